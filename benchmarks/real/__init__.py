"""`make real`: all evidence on a real model and real questions."""
