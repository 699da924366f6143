"""Small real drills of the check "drill": their execution on a Ray (`on_ray`), and their job (`job/`)."""
