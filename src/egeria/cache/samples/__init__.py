"""Which samples a batch is made of, whether their inputs repeat, and how augmentation is fixed."""
