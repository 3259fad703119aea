"""A ring under a virtual clock: the product's scheduler, and tables of stage times."""
