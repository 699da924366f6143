"""Small real drills: which are wanted (`wanted`), how they are carried out (`on_ray`), and their job (`job/`)."""
