-- devices.lua: the devices on which a spec runs its tests. Where another device has the name `opaque`
-- (PERI_OPAQUE_DEVICE), it is that one alone: the same tests run on "cpu" without it.
return os.getenv "PERI_OPAQUE_DEVICE" and { "opaque" } or { "cpu", "opaque" }
