#: group: lio
#: about: riser proves who it is to the kernel's target over TCP, and is refused otherwise
#: limit: 300
SCHEME=iscsi
. /vm/lio.sh
chap_of_lio
