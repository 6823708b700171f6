#: group: lio
#: about: CHAP login of riser to the kernel's target over TCP, rejected with a wrong secret
#: limit: 300
SCHEME=iscsi
. /vm/lio.sh
chap_of_lio
