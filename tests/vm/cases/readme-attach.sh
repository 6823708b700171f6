#: group: srpt
#: about: the book: attach from a Linux target, as documented
#: limit: 200
two_hosts
trap readme_clean EXIT
rdma link delete rxe0
mkdir -p /etc/target/pr /var/target/pr /srv
truncate -s 1G /srv/disk0.img
readme_clean() {
    set +e
    T=/sys/kernel/config/target
    echo 0 >"$port/enable"
    rm "$port"/acls/*/lun_0/disk "$port/lun/lun_0/disk"
    rmdir "$port"/acls/*/lun_0 "$port"/acls/* "$port/lun/lun_0" "$port" "$(dirname "$port")" \
        $T/srpt $T/core/fileio_0/disk0 $T/core/fileio_0
    modprobe -r ib_srpt
    rm -f /srv/disk0.img
    one_host
}
# The first block is for the target, the second block is for our host.
blocks=$(book attach "From a Linux target" sh)
typed <<<"${blocks%%riser *}"
riser() { riser_on roce "$@"; }
typed <<<"riser ${blocks#*riser }"
wait_for 10 nothing_attached
[ "$(riser_on rdma_core discover "srp://10.99.0.1?id_ext=$(sed s/0x// /sys/module/ib_srpt/parameters/srpt_service_guid)&ioc_guid=$(sed s/0x// /sys/module/ib_srpt/parameters/srpt_service_guid)" -o json | grep -c FILEIO)" = 1 ] || fail "not found"
