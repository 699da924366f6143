"""Reports of a preflight: on a terminal, as a page, as JUnit XML, and while it runs. Renders a Result, decides nothing."""
