#: group: lio
#: about: riser writes, flushes and loses sessions over iscsi, on fileio, block and ramdisk with write cache and FUA on and off
#: limit: 900
SCHEME=iscsi
CAPTURED="-s 0 -c 10000 tcp port 3260"
. /vm/backstores.sh
all_backstores
