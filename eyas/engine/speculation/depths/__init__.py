"""The depth of drafts: acceptance and times, estimated, and the depth that promises most."""
