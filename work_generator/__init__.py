"""From the admin's model to workunits: export, data shards, microtasks, supply."""
