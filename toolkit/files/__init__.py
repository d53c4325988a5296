"""Files that are whole or absent: atomic writes, digests, journals, locks, tensors; and text on the console."""
