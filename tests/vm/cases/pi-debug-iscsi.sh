#: group: pi
#: about: protection information over iSCSI: the same commands to riserd and to scsi_debug
#: limit: 1800
OVER=iscsi
. /vm/pi.sh
pi_rig "owner: client"
against_debug
