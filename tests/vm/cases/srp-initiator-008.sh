#: group: srp
#: about: 8 MiB transfers, one descriptor per request
#: limit: 300
PARAMS=ch_count=1
three_disks_rig cmd_sg_entries=1
large_transfers 8m
