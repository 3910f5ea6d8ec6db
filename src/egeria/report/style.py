"""The style sheet of the page: system fonts, light and dark, wide and narrow."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6575; --page: #f5f6f8; --card: #ffffff; --line: #e1e5ea;
  --grid: #c9d0d9; --loss: #1f5fbf; --rate: #8a94a3; --freeze: #0b7fab; --thaw: #c2410c; --skip: #7c3aed;
  --good: #12763f; --bad: #b42318; --note: #fff7e0; --note-line: #e6c565; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #9aa5b5; --page: #11151b; --card: #1a2029; --line: #2c3440; --grid: #3d4755;
    --loss: #7fb0ff; --rate: #8a94a3; --freeze: #4cc3ee; --thaw: #fb8b4c; --skip: #b794f6; --good: #5fd08e;
    --bad: #ff8f86; --note: #2b2615; --note-line: #6b5a1e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5; font-size: 16px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main, header, footer { max-width: 62rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.25rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .25rem; }
p { margin: .25rem 0 .75rem; max-width: 46rem; }
.soft, figcaption, footer { color: var(--soft); font-size: .9rem; }
.verdict { font-size: 1.1rem; margin: 1rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.25rem 0;
  padding: 0; list-style: none; }
.tiles li, .card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; }
.tiles li { padding: .75rem .9rem; overflow-wrap: anywhere; }
.tiles b { display: block; font-size: 1.45rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tiles span { display: block; color: var(--soft); font-size: .82rem; line-height: 1.35; }
.good { color: var(--good); } .bad { color: var(--bad); }
.notes { background: var(--note); border: 1px solid var(--note-line); border-radius: .6rem; margin: 1rem 0;
  padding: .7rem .9rem .7rem 2rem; font-size: .92rem; overflow-wrap: anywhere; }
figure { margin: 0 0 1rem; padding: .9rem 1rem; }
figcaption { margin-bottom: .5rem; }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid var(--loss); }
svg { display: block; width: 100%; min-width: 34rem; height: auto; color: var(--ink); }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif !important; }
.legend { display: flex; flex-wrap: wrap; gap: .15rem 1rem; margin: .5rem 0 0; padding: 0; list-style: none;
  font-size: .85rem; overflow-wrap: anywhere; }
.legend i { display: inline-block; width: .85em; height: .85em; border-radius: .2em; margin-right: .4em;
  vertical-align: -.08em; }
.card.scroll { padding: 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .45rem .8rem; border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td { overflow-wrap: break-word; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.what { min-width: 9rem; max-width: 16rem; }
.reason { min-width: 16rem; }
.what, .reason, tbody th { overflow-wrap: anywhere; }
tbody th { font-weight: 600; }
tbody th:not(.number) { min-width: 8rem; }
details { padding: .6rem .9rem; margin-top: 2rem; }
summary { cursor: pointer; font-weight: 600; }
details h3 { margin-top: 1rem; }
dt { font-weight: 600; margin-top: .6rem; } dd { margin: 0 0 0 1rem; max-width: 46rem; }
footer { padding-top: 2rem; padding-bottom: 3rem; }
@media (max-width: 30rem) { body { font-size: 15px; }
  main, header, footer { padding-left: .8rem; padding-right: .8rem; }
  .tiles { grid-template-columns: 1fr 1fr; } .tiles b { font-size: 1.2rem; } figure { padding: .75rem; } }
@media print { body { background: #fff; } .scroll { overflow: visible; } svg { min-width: 0; } }
"""
