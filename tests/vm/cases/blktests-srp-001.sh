#: group: srp
#: about: every logical unit appears at the initiator
#: limit: 120
PARAMS=ch_count=4
blktests_rig
three() { [ "$(ls -d /sys/class/scsi_device/*/device/block/* | wc -l)" = 3 ]; }
wait_for 30 three
