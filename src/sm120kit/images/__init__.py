"""Container images: contents, build, checks, publishing and comparison."""
