"""What the device layer asks the operating system: processes, pods, cgroups, files.  Knows no lease."""
