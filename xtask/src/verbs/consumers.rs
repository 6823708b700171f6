//! Test cases for libraries and programs that use verbs: libfabric, UCX, Open MPI, fio and qperf.

use super::cases::{Case, Ready};
use crate::packages::{Need, need};

/// Required Debian packages.
pub(super) const NEEDS: &[Need] = &[
    need("fi_pingpong", "libfabric-bin", "libfabric over verbs"),
    need("ucx_perftest", "ucx-utils", "UCX over verbs"),
    need("mpirun", "openmpi-bin", "Open MPI over UCX"),
    need("mpicc", "libopenmpi-dev", "Open MPI over UCX"),
    need("fio", "fio", "fio over verbs"),
    need("qperf", "qperf", "qperf over verbs"),
    need("ip", "iproute2", "a network interface for RDMA programs"),
];

/// UCX transports that don't require hardware from a specific vendor. `rc_v` is `rc_verbs`, using
/// datagrams to connect.
const TRANSPORTS: [&str; 2] = ["rc_v", "ud_v"];

pub(super) fn all() -> Vec<Case> {
    let mut cases = libfabric();
    cases.extend(ucx());
    cases.extend(mpi());
    cases.extend(fio());
    cases.extend(qperf());
    cases
}

/// When run with `-c`, `fi_pingpong` verifies the data of all messages.
fn libfabric() -> Vec<Case> {
    let info = Case::alone(
        "libfabric",
        "fi_info",
        "fi_info -p verbs",
        &["FI_EP_MSG", "FI_EP_DGRAM", "verbs;ofi_rxm"],
    );
    let pingpong = |name: &str, options: &str| {
        let command = format!("fi_pingpong {options} -c -I 20 -S all");
        let server = format!("{command} -B {{port}}");
        let client = format!("{command} -P {{port}} {{server}}");
        let name = format!("fi_pingpong {name}");
        Case::pair("libfabric", &name, [&server, &client], &["usec/xfer"])
            .ready(Ready::Port)
            .seconds(60)
    };
    let cases = [
        info,
        pingpong("msg", "-p verbs -e msg"),
        pingpong("dgram", "-p verbs -e dgram"),
        pingpong("rxm", "-p verbs;ofi_rxm -e rdm"),
    ];
    cases.map(Case::on_network).to_vec()
}

fn ucx() -> Vec<Case> {
    // Tests with the options that are different. Messages with 64 KiB use the rendezvous protocol.
    const TESTS: &[&str] = &[
        "tag_lat",
        "tag_bw",
        "tag_lat -s 65536",
        "tag_bw -s 65536",
        "tag_sync_lat",
        "stream_lat",
        "stream_bw",
        "ucp_am_lat",
        "ucp_am_bw -s 65536",
        "ucp_put_lat",
        "ucp_put_bw -s 65536",
        "ucp_get",
        "ucp_get -s 65536",
        "ucp_add",
        "ucp_fadd",
        "ucp_swap",
        "ucp_cswap",
    ];
    // Test device operations directly, without a protocol.
    const RAW: &[&str] = &[
        "am_lat",
        "am_bw",
        "put_lat",
        "put_bw",
        "get -D bcopy",
        "get -D zcopy -s 4096",
        "add_lat",
        "add_mr",
        "fadd",
        "cswap",
    ];
    let info = Case::alone(
        "ucx",
        "ucx_info -d",
        "ucx_info -d",
        &["rc_verbs", "ud_verbs"],
    );
    let pair = |name: &str, settings: &str, options: &str| {
        let server = format!("env {settings} UCX_NET_DEVICES=riser0:1 ucx_perftest -p {{port}}");
        let client = format!("{server} {{server}} {options} -n 500 -w 20");
        Case::pair("ucx", name, [&server, &client], &["Final:"])
            .ready(Ready::Port)
            .seconds(60)
    };
    let mut cases = vec![info];
    for transport in TRANSPORTS {
        for test in TESTS {
            let name = format!("ucx_perftest {transport} {test}");
            let settings = format!("UCX_TLS={transport}");
            cases.push(pair(&name, &settings, &format!("-t {test}")));
        }
    }
    for test in RAW {
        let name = format!("ucx_perftest -x rc_verbs {test}");
        let options = format!("-x rc_verbs -d riser0:1 -t {test}");
        cases.push(pair(&name, "UCX_TLS=rc_v", &options));
    }
    cases.into_iter().map(Case::on_network).collect()
}

/// Runs four ranks on the same address and verifies the received data. In this namespace we run as
/// root, but Open MPI only allows this if two variables are set.
fn mpi() -> Vec<Case> {
    let case = |transport: &&str| {
        let command = format!(
            "env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
             UCX_TLS={transport},self UCX_NET_DEVICES=riser0:1 \
             mpirun --mca plm isolated --mca pml ucx --mca osc ucx --mca btl self \
             --oversubscribe -n 4 {{dir}}/program 10"
        );
        let says = ["ring of 4 ranks: ok", "allreduce: ok", "all is right"];
        let name = format!("four ranks, {transport}");
        let case = Case::alone("mpi", &name, &command, &says);
        Case {
            source: Some("tests/mpi/exchange.c"),
            ..case.on_network().seconds(120)
        }
    };
    TRANSPORTS.iter().map(case).collect()
}

/// The fio client reads or writes memory on the server, which only waits. For this side, fio always
/// uses `--rw=read`, and the client uses `--rw=write` even if it should read. With SEND, fio has no
/// flow control and will fail if the server has not posted a receive buffer. We use threads for its
/// jobs, because processes would create separate sessions and would continue to run if a case
/// fails.
fn fio() -> Vec<Case> {
    let case = |verb: &str| {
        let common = "--thread --ioengine=rdma --port={port} --bs=64k --size=32m --iodepth=16";
        let server = format!("fio --name=server {common} --rw=read");
        let client =
            format!("fio --name=client {common} --hostname={{server}} --verb={verb} --rw=write");
        let name = format!("fio --verb={verb}");
        Case::pair("fio", &name, [&server, &client], &["Run status group 0"])
    };
    ["write", "read"].map(case).to_vec()
}

/// Only use tests with reliable connections, because these use the connection manager. For the
/// other tests, qperf doesn't set a global route, which is required for RoCE.
fn qperf() -> Vec<Case> {
    const TESTS: &[(&str, &str)] = &[
        ("rc_lat", "latency"),
        ("rc_bw", "bw"),
        ("rc_rdma_read_lat", "latency"),
        ("rc_rdma_read_bw", "bw"),
        ("rc_rdma_write_lat", "latency"),
        ("rc_rdma_write_bw", "bw"),
        ("rc_rdma_write_poll_lat", "latency"),
        ("rc_compare_swap_mr", "msg_rate"),
        ("rc_fetch_add_mr", "msg_rate"),
        ("ver_rc_compare_swap", "msg_rate"),
        ("ver_rc_fetch_add", "msg_rate"),
    ];
    let case = |(test, figure): &(&str, &'static str)| {
        let client = format!("qperf {{server}} -lp {{port}} -t 1 -cm 1 {test}");
        let commands = ["qperf -lp {port}", &client];
        Case::pair("qperf", test, commands, &[*figure])
            .ready(Ready::Port)
            .with_sigterm()
    };
    TESTS.iter().map(case).collect()
}
