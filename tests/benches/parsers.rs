//! What a peer's bytes cost before anything is done for them: packets, messages of the connection
//! manager, PDUs, information units, keys of a login, CDBs, and the ICRC over a packet.
//!
//! `cargo bench -p riser-tests --bench parsers [-- FILTER]`. The inputs are the captures of
//! `tests/data` and the seeds of the fuzz targets.

#![allow(missing_docs, reason = "a benchmark")]

use std::hint::black_box;
use std::net::SocketAddr;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use riser_scsi::iscsi::frame::{Digests, Framer};
use riser_scsi::iscsi::pdu::{FromInitiator as FromIscsiInitiator, FromTarget as FromIscsiTarget};
use riser_scsi::iscsi::text;
use riser_scsi::iser::Message;
use riser_scsi::opcode::Opcode;
use riser_scsi::srp::{FromInitiator, FromTarget, ImmediateDataOffset};
use riser_tests::capture::packets;
use riser_tests::seeds;
use riser_transport::wire::cm_msg::CmMessage;
use riser_transport::wire::icrc::IcrcFlow;
use riser_transport::wire::packet::Packet;

/// Text of an operational negotiation, as Linux sends it.
const LOGIN_KEYS: &[u8] = b"HeaderDigest=None\0DataDigest=None\0DefaultTime2Wait=2\0\
    DefaultTime2Retain=0\0IFMarker=No\0OFMarker=No\0ErrorRecoveryLevel=0\0InitialR2T=No\0\
    ImmediateData=Yes\0MaxBurstLength=16776192\0FirstBurstLength=262144\0MaxOutstandingR2T=1\0\
    MaxConnections=1\0DataPDUInOrder=Yes\0DataSequenceInOrder=Yes\0\
    MaxRecvDataSegmentLength=262144\0";

/// Adds a benchmark that takes each input once.
fn each(
    criterion: &mut Criterion,
    name: &str,
    inputs: &[Vec<u8>],
    mut take: impl FnMut(&[u8]) -> bool,
) {
    assert!(inputs.iter().all(|input| take(input)), "{name}");
    let mut group = criterion.benchmark_group("parse");
    group.throughput(Throughput::Elements(inputs.len() as u64));
    group.bench_function(name, |bencher| {
        bencher.iter(|| {
            for input in inputs {
                black_box(take(black_box(input)));
            }
        });
    });
}

fn of_target(target: &str) -> Vec<Vec<u8>> {
    let seeds = seeds::load(target).into_iter();
    seeds.map(|(_, bytes)| bytes).collect()
}

fn parsers(criterion: &mut Criterion) {
    let capture = include_bytes!("../data/golden_srp.pcap");
    let datagrams: Vec<_> = packets(capture).map(|p| p.datagram.to_vec()).collect();
    each(criterion, "packets of RoCEv2", &datagrams, |bytes| {
        Packet::parse(bytes).is_ok()
    });
    let mads = of_target("cm_message");
    each(criterion, "messages of the CM", &mads, |bytes| {
        CmMessage::parse(bytes).is_ok()
    });
    let requests = of_target("from_initiator");
    each(criterion, "SRP of an initiator", &requests, |bytes| {
        let immediate = [None, ImmediateDataOffset::new(68)];
        let mut parsed = immediate.iter().map(|at| FromInitiator::parse(bytes, *at));
        parsed.any(|iu| iu.is_ok())
    });
    each(
        criterion,
        "SRP of a target",
        &of_target("from_target"),
        |bytes| FromTarget::parse(bytes).is_ok(),
    );
    // Their first byte is for the fuzz target.
    let streams = of_target("stream")
        .into_iter()
        .map(|bytes| bytes[1..].to_vec());
    let streams: Vec<_> = streams.collect();
    let mut framer = Framer::new(8192);
    framer.set(8192, Digests::default());
    each(criterion, "iSCSI on TCP", &streams, |bytes| {
        let Ok((_, Some(frame))) = framer.next(bytes) else {
            return false;
        };
        FromIscsiInitiator::parse(&frame).is_ok() || FromIscsiTarget::parse(&frame).is_ok()
    });
    each(criterion, "iSER", &of_target("message"), |bytes| {
        Message::parse(bytes).is_ok()
    });
    each(
        criterion,
        "keys of a login",
        &[LOGIN_KEYS.to_vec()],
        |bytes| text::pairs(bytes).all(|pair| pair.is_ok()),
    );
}

/// The way from a CDB to the row of the table of operation codes.
fn lookup(criterion: &mut Criterion) {
    const CDBS: [[u8; 16]; 4] = [
        [0x28, 0, 0, 0, 0, 1, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0],
        [0x8a, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0],
        [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0],
        [0xff; 16],
    ];
    let mut group = criterion.benchmark_group("look up");
    group.throughput(Throughput::Elements(CDBS.len() as u64));
    group.bench_function("CDBs", |bencher| {
        bencher.iter(|| {
            for cdb in &CDBS {
                black_box(Opcode::of(black_box(cdb)));
            }
        });
    });
}

fn icrc(criterion: &mut Criterion) {
    let [a, b]: [SocketAddr; 2] =
        ["127.0.0.1:4791", "127.0.0.2:4791"].map(|at| at.parse().expect("an address"));
    let flow = IcrcFlow::new(a, b).expect("both are IPv4");
    let mut group = criterion.benchmark_group("ICRC");
    for len in [64_usize, 1024, 4096] {
        let body = vec![0x5a; len];
        group.throughput(Throughput::Bytes(len as u64));
        group.bench_with_input(BenchmarkId::from_parameter(len), &body, |bencher, body| {
            bencher.iter(|| flow.compute(black_box(body), 7));
        });
        // A wrong guess of the peer's identification takes a search for the right one.
        let datagram = [
            body,
            flow.compute(&vec![0x5a; len], 7).to_le_bytes().to_vec(),
        ]
        .concat();
        for (guess, id) in [("checked", 7), ("checked after a wrong guess", 8)] {
            assert_eq!(flow.check(&datagram, id), Ok(7));
            group.bench_function(BenchmarkId::new(guess, len), |bencher| {
                bencher.iter(|| flow.check(black_box(&datagram), id));
            });
        }
    }
}

criterion_group!(benches, parsers, lookup, icrc);
criterion_main!(benches);
