"""Tasks in time: streams, links and hosts of device classes, and micro-batches through stages."""
