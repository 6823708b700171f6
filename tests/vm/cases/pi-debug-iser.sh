#: group: pi
#: about: protection information over iSER: the same commands to riserd and to scsi_debug
#: limit: 3600
OVER=iser
. /vm/pi.sh
pi_rig "owner: client"
against_debug
