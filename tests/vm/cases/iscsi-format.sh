#: group: iscsi
#: about: sg_format changes the type of protection information
#: limit: 600
TRANSPORT=tcp
DISK_KEYS=", protection: { type: 1 }"
. /vm/iscsi.sh

# Checks the output of a command: shows TEXT COMMAND …
shows() {
    local text=$1
    shift
    "$@" | tee /tmp/shown
    grep -qF -- "$text" /tmp/shown || fail "$1 does not show $text"
}

# Erases the disk and checks its type: formats TEXT OPTION …
formats() {
    local text=$1
    shift
    dd if=/dev/urandom of="$DISK" bs=1M count=4 oflag=direct status=none
    sg_format --format --wait --quick "$@" "$DISK"
    shows "$text" sg_readcap --16 "$DISK"
    cmp -n $((4 << 20)) "$DISK" /dev/zero || fail "the disk was not erased"
}

iscsi_rig 64
iscsi_node
iscsi_login
shows "prot_en=1, p_type=0" sg_readcap --16 "$DISK"
shows "SPT=7" sg_vpd --page=ei "$DISK"
formats "prot_en=1, p_type=1" --fmtpinfo=3
formats "prot_en=1, p_type=2" --fmtpinfo=3 --pfu=1
formats "prot_en=0" --fmtpinfo=0
formats "prot_en=1, p_type=0" --fmtpinfo=2
! sg_format --format --wait --quick --fmtpinfo=1 "$DISK" || fail "FMTPINFO 1 was accepted"
iscsi_logout
stop_serving
