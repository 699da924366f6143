"""Small real drills of the check "drill": carried out on a Ray (`on_ray`), and their job (`job/`)."""
