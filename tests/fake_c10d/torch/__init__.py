"""What gpuckpt takes of torch for a c10d rendezvous, for machines without torch: on PYTHONPATH in its place."""
