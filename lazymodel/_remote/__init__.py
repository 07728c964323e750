"""Files in object stores and on web servers: their locations, requests for ranges, and prefetching."""
