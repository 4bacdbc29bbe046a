"""Token streams: segments, ring buffer, readers, registry, replay."""
