"""How deep rounds draft: acceptance and times, estimated, and the depth that promises most."""
