"""A folder's batches on the other GPUs too: the same WebUI in one more process for each of them."""
