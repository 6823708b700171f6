#: group: srp
#: about: 4 MiB buffered writes, 255 descriptors per request
#: limit: 300
PARAMS="ch_count=1 queue_size=32 max_cmd_per_lun=32 max_sect=131072"
three_disks_rig cmd_sg_entries=255
large_transfers 4m --direct=0
