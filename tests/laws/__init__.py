"""The eight laws of the library over eight models, by its public names alone.

`models`: the models, each small and chosen for one property.
`support`: the loop, the same loop freezing by hand, and all that touches names or events of the library.
`test_plain`: law 1, attached but never freezing = the plain loop; a refused model too.
`test_controllers`: law 2, inline = process, and law 8, algorithm 1 worked out by hand.
`test_cache`: law 3, cached = computed.
`test_by_hand`: law 4, freeze and thaw leave nothing behind, and law 7, frozen = frozen by hand.
`test_resume`: law 5, stopped and resumed = uninterrupted.
`test_two_ranks`: law 6, one rank and two ranks decide alike.

They outlive rewrites of the library: where one fails, the library is wrong, or a name in `support` has changed.
"""
