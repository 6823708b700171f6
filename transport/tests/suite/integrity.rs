//! Integrity regions: protection information is inserted, checked, passed and stripped.

use riser_memory::{MemSlice, Memory};
use riser_transport::verbs::{
    Access, GuardCap, GuardType, LKey, Mr, ProtectionCap, RecvWr, SendOp, SendWr, SigAttrs,
    SigCheck, SigDomain, SigError, SigErrorKind, T10Dif, TagEscape, Verbs as _, VerbsError,
    WcOpcode, WcStatus, WrId,
};

use crate::suite::ops::{ok, written};
use crate::suite::world::{End, Side, World, connected, pattern};

const RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_WRITE);

const PLAIN: SigDomain = SigDomain::None;

/// Transfers from an integrity region of B.
#[derive(Clone, Copy, Debug)]
enum Out {
    PeerReads,
    Send,
    Write,
}

const OUT: [Out; 3] = [Out::PeerReads, Out::Send, Out::Write];

/// Transfers to an integrity region of B.
#[derive(Clone, Copy, Debug)]
enum In {
    PeerWrites,
    Receive,
    Read,
}

const IN: [In; 3] = [In::PeerWrites, In::Receive, In::Read];

/// Two connected sides, and an integrity region of B.
struct Bench {
    a: Side,
    b: Side,
    mr: Mr,
    data: Memory,
    protection: Memory,
}

/// Connects the devices, or returns `None` if B does not support integrity regions.
fn bench<W: World>(w: &mut W) -> Option<Bench> {
    let is_rdma_core = w.is_rdma_core(End::B);
    let (a, b) = connected(w);
    let p = w.provider(End::B);
    let cap = p.device_attr().integrity;
    assert_eq!(cap.is_none(), is_rdma_core);
    let Some(cap) = cap else {
        let attrs = both(T10Dif::new(512, 0));
        let unsupported = VerbsError::Unsupported("integrity regions");
        let memory = [b.memory.whole()];
        assert_eq!(p.alloc_mr_integrity(b.pd, 1, 1), Err(unsupported));
        let mapped = p.map_mr_sg_pi(b.mr.id, &memory, &[], &attrs);
        assert_eq!(mapped, Err(unsupported));
        assert_eq!(p.check_mr_status(b.mr.id), Err(unsupported));
        return None;
    };
    assert!(cap.protection.contains(ProtectionCap::TYPE_1));
    assert!(cap.guard.contains(GuardCap::CRC));
    Some(Bench {
        mr: p.alloc_mr_integrity(b.pd, 4, 2).unwrap(),
        a,
        b,
        data: Memory::new(1 << 16).unwrap(),
        protection: Memory::new(1 << 12).unwrap(),
    })
}

fn both(dif: T10Dif) -> SigAttrs {
    SigAttrs {
        mem: SigDomain::T10Dif(dif),
        wire: SigDomain::T10Dif(dif),
        check: SigCheck::all(),
    }
}

fn attrs(mem: SigDomain, wire: SigDomain) -> SigAttrs {
    SigAttrs {
        mem,
        wire,
        check: SigCheck::all(),
    }
}

fn slice(memory: &Memory, at: usize, len: usize) -> MemSlice {
    memory.slice(at..at + len).unwrap()
}

impl Bench {
    /// Maps `data` and `protection` and registers the region with a new key.
    fn register<W: World>(
        &mut self,
        w: &mut W,
        data: &[MemSlice],
        protection: &[MemSlice],
        attrs: SigAttrs,
    ) {
        let p = w.provider(End::B);
        let id = self.mr.id;
        // If the peer repeated a READ request after the status was read, the same error is set again.
        p.check_mr_status(id).unwrap();
        let length = p.map_mr_sg_pi(id, data, protection, &attrs).unwrap();
        let key = self.mr.rkey.next();
        let op = SendOp::RegMr {
            mr: id,
            key,
            access: RIGHTS,
        };
        p.post_send(self.b.qp, &[SendWr::new(70, op, &[])]).unwrap();
        ok(w, &self.b, WcOpcode::RegMr, 70);
        let mr = w.provider(End::B).query_mr(id).unwrap().mr;
        assert_eq!((mr.addr, mr.length), (0, length));
        assert_eq!((mr.rkey, mr.lkey), (key, LKey(key.0)));
        self.mr = mr;
    }

    fn invalidate<W: World>(&self, w: &mut W) {
        let wr = SendWr::new(71, SendOp::LocalInv(self.mr.rkey), &[]);
        let p = w.provider(End::B);
        p.post_send(self.b.qp, &[wr]).unwrap();
        ok(w, &self.b, WcOpcode::LocalInv, 71);
    }

    fn status<W: World>(&self, w: &mut W) -> Option<SigError> {
        w.provider(End::B).check_mr_status(self.mr.id).unwrap()
    }

    /// Posts a request of B that uses a range of the region.
    fn post<W: World>(&self, w: &mut W, op: SendOp, at: usize, len: usize) {
        let sges = [self.mr.sge(at, len)];
        let wr = SendWr::new(72, op, &sges);
        let p = w.provider(End::B);
        p.post_send(self.b.qp, &[wr]).unwrap();
    }

    /// Transfers a range of the region to A and returns the bytes.
    fn transfer_out<W: World>(&self, w: &mut W, how: Out, at: usize, len: usize) -> Vec<u8> {
        let Self { a, b, mr, .. } = self;
        a.memory.fill(0, len, 0xee);
        match how {
            Out::PeerReads => {
                a.send(w, 1, SendOp::Read(mr.remote(at)), 0, len);
                ok(w, a, WcOpcode::Read, 1);
            }
            Out::Send => {
                a.recv(w, 1, 0, len);
                self.post(w, SendOp::Send, at, len);
                ok(w, a, WcOpcode::Recv, 1);
                ok(w, b, WcOpcode::Send, 72);
            }
            Out::Write => {
                self.post(w, SendOp::Write(a.remote(0)), at, len);
                written(w, b, 72);
            }
        }
        a.bytes(0, len)
    }

    /// Transfers bytes from A to a range of the region.
    fn transfer_in<W: World>(&self, w: &mut W, how: In, at: usize, bytes: &[u8]) {
        let Self { a, b, mr, .. } = self;
        let len = bytes.len();
        a.memory.write(0, bytes);
        match how {
            In::PeerWrites => {
                a.send(w, 1, SendOp::Write(mr.remote(at)), 0, len);
                written(w, a, 1);
            }
            In::Receive => {
                let sges = [mr.sge(at, len)];
                let wr = RecvWr {
                    wr_id: WrId(73),
                    sges: &sges,
                };
                w.provider(End::B).post_recv(b.qp, &[wr]).unwrap();
                a.send(w, 1, SendOp::Send, 0, len);
                ok(w, b, WcOpcode::Recv, 73);
                ok(w, a, WcOpcode::Send, 1);
            }
            In::Read => {
                self.post(w, SendOp::Read(a.remote(0)), at, len);
                ok(w, b, WcOpcode::Read, 72);
            }
        }
    }

    /// Registers the region for `blocks` blocks in three data segments and two protection segments.
    fn register_separate<W: World>(&mut self, w: &mut W, blocks: usize, attrs: SigAttrs) {
        let interval = match (attrs.mem, attrs.wire) {
            (SigDomain::T10Dif(dif), _) | (_, SigDomain::T10Dif(dif)) => dif.interval as usize,
            _ => unreachable!("one domain has tuples"),
        };
        let len = blocks * interval;
        // The segments are not aligned to blocks or tuples.
        let data = [
            slice(&self.data, 3, 100),
            slice(&self.data, 200, len - 101),
            slice(&self.data, 0, 1),
        ];
        let protection = match attrs.mem {
            SigDomain::None => vec![],
            SigDomain::T10Dif(_) => vec![
                slice(&self.protection, 1, 5),
                slice(&self.protection, 100, blocks * 8 - 5),
            ],
        };
        self.register(w, &data, &protection, attrs);
    }

    /// Writes the blocks to the memory of [`Bench::register_separate`], and the tuples if any.
    fn fill(&self, blocks: &[u8], tuples: &[u8]) {
        let (last, first) = blocks.split_last().unwrap();
        self.data.write(3, &first[..100]);
        self.data.write(200, &first[100..]);
        self.data.write(0, &[*last]);
        if let Some((first, rest)) = tuples.split_at_checked(5) {
            self.protection.write(1, first);
            self.protection.write(100, rest);
        }
    }

    /// Returns the blocks in the memory of [`Bench::register_separate`].
    fn blocks(&self, len: usize) -> Vec<u8> {
        let parts = [(3, 100), (200, len - 101), (0, 1)];
        parts
            .map(|(at, len)| slice(&self.data, at, len).to_vec())
            .concat()
    }

    /// Returns the tuples in the memory of [`Bench::register_separate`].
    fn tuples(&self, blocks: usize) -> Vec<u8> {
        let parts = [(1, 5), (100, blocks * 8 - 5)];
        parts
            .map(|(at, len)| slice(&self.protection, at, len).to_vec())
            .concat()
    }
}

/// CRC-16/T10-DIF, one bit at a time.
fn crc(data: &[u8]) -> u16 {
    data.iter().fold(0, |crc, &byte| {
        (0..8).fold(crc ^ u16::from(byte) << 8, |crc: u16, _| {
            if crc & 0x8000 == 0 {
                crc << 1
            } else {
                crc << 1 ^ 0x8bb7
            }
        })
    })
}

/// Returns the tuples for blocks of `interval` bytes, with incremented reference tags.
fn tuples(blocks: &[u8], interval: usize, app_tag: u16, ref_tag: u32) -> Vec<u8> {
    let mut all = Vec::new();
    for (i, block) in blocks.chunks(interval).enumerate() {
        all.extend(crc(block).to_be_bytes());
        all.extend(app_tag.to_be_bytes());
        all.extend(ref_tag.wrapping_add(i as u32).to_be_bytes());
    }
    all
}

/// Returns the blocks, each followed by its tuple.
fn interleave(blocks: &[u8], interval: usize, tuples: &[u8]) -> Vec<u8> {
    blocks
        .chunks(interval)
        .zip(tuples.chunks(8))
        .flat_map(|(block, tuple)| [block, tuple].concat())
        .collect()
}

/// Two blocks with all bytes FFh and 0, 1, …, 255, …: the wire layout is known.
pub(crate) fn inserted_tuples_have_known_bytes<W: World>(mut w: W) {
    let w = &mut w;
    let Some(mut bench) = bench(w) else { return };
    let mut blocks = vec![0xff; 512];
    blocks.extend((0..512u32).map(|i| i as u8));
    let dif = T10Dif {
        app_tag: 0xabcd,
        ..T10Dif::new(512, 0x1020_30ff)
    };
    bench.register_separate(w, 2, attrs(PLAIN, SigDomain::T10Dif(dif)));
    assert_eq!(bench.mr.length, 1040);
    bench.fill(&blocks, &[]);
    for how in OUT {
        let wire = bench.transfer_out(w, how, 0, 1040);
        assert_eq!(wire[..512], blocks[..512], "{how:?}");
        let first = [0xe6, 0xa1, 0xab, 0xcd, 0x10, 0x20, 0x30, 0xff];
        assert_eq!(wire[512..520], first, "{how:?}");
        assert_eq!(wire[520..1032], blocks[512..], "{how:?}");
        let second = [0x4f, 0x10, 0xab, 0xcd, 0x10, 0x20, 0x31, 0x00];
        assert_eq!(wire[1032..], second, "{how:?}");
    }
    bench.invalidate(w);
    // The other guard, in memory: the Internet checksum.
    let dif = T10Dif {
        guard: GuardType::IpChecksum,
        ref_remap: false,
        ..dif
    };
    bench.register_separate(w, 2, attrs(SigDomain::T10Dif(dif), PLAIN));
    assert_eq!(bench.mr.length, 1024);
    bench.transfer_in(w, In::PeerWrites, 0, &blocks);
    assert_eq!(bench.blocks(1024), blocks);
    let tuples = bench.tuples(2);
    let first = [0x00, 0x00, 0xab, 0xcd, 0x10, 0x20, 0x30, 0xff];
    assert_eq!(tuples[..8], first);
    let second = [0x7f, 0x80, 0xab, 0xcd, 0x10, 0x20, 0x30, 0xff];
    assert_eq!(tuples[8..], second);
    assert_eq!(bench.status(w), None);
}

/// Every direction and layout, with both intervals.
pub(crate) fn tuples_are_inserted_stripped_and_passed<W: World>(mut w: W) {
    let w = &mut w;
    let Some(mut bench) = bench(w) else { return };
    for (interval, count) in [(512, 20), (4096, 5)] {
        let len = interval * count;
        let dif = SigDomain::T10Dif(T10Dif::new(interval as u32, 0xffff_fffe));
        for (case, (mem, wire)) in [(PLAIN, dif), (dif, PLAIN), (dif, dif)]
            .into_iter()
            .enumerate()
        {
            bench.register_separate(w, count, attrs(mem, wire));
            let blocks = pattern(case as u64 + 5, len);
            let tuples = tuples(&blocks, interval, 0, 0xffff_fffe);
            let image = match wire {
                SigDomain::None => blocks.clone(),
                SigDomain::T10Dif(_) => interleave(&blocks, interval, &tuples),
            };
            assert_eq!(bench.mr.length, image.len() as u64);
            bench.fill(&blocks, &tuples);
            for how in OUT {
                let wire = bench.transfer_out(w, how, 0, image.len());
                assert!(wire == image, "{interval} {case} {how:?}");
            }
            for how in IN {
                bench.fill(&vec![0; len], &vec![0; tuples.len()]);
                bench.transfer_in(w, how, 0, &image);
                assert!(bench.blocks(len) == blocks, "{interval} {case} {how:?}");
                if mem != PLAIN {
                    assert_eq!(bench.tuples(count), tuples, "{interval} {case} {how:?}");
                }
            }
            assert_eq!(bench.status(w), None, "{interval} {case}");
            bench.invalidate(w);
        }
        // Tuples after each block in memory.
        let memory = [slice(&bench.data, 7, len + 8 * count)];
        let blocks = pattern(9, len);
        let image = interleave(
            &blocks,
            interval,
            &tuples(&blocks, interval, 0, 0xffff_fffe),
        );
        bench.register(w, &memory, &[], attrs(dif, PLAIN));
        bench.transfer_in(w, In::Receive, 0, &blocks);
        assert!(memory[0].to_vec() == image);
        assert!(bench.transfer_out(w, Out::Send, 0, len) == blocks);
        assert_eq!(bench.status(w), None);
        bench.invalidate(w);
    }
}

/// Each field, in both domains. The data is transferred, and only the first error is recorded.
pub(crate) fn failed_checks_report_kind_and_offset<W: World>(mut w: W) {
    let w = &mut w;
    let Some(mut bench) = bench(w) else { return };
    let dif = T10Dif {
        app_tag: 0x5678,
        ..T10Dif::new(512, 1000)
    };
    let blocks = pattern(3, 5 * 512);
    let good = tuples(&blocks, 512, 0x5678, 1000);
    let guard = u32::from(crc(&blocks[1024..1536]));
    let cases = [
        (16, SigErrorKind::BadGuard, guard, guard ^ 0x8000),
        (18, SigErrorKind::BadAppTag, 0x5678, 0xd678),
        (20, SigErrorKind::BadRefTag, 1002, 0x8000_03ea),
    ];
    for (mem, wire) in [(dif, None), (dif, Some(dif))] {
        let wire = wire.map_or(PLAIN, SigDomain::T10Dif);
        bench.register_separate(w, 5, attrs(SigDomain::T10Dif(mem), wire));
        for (at, kind, expected, actual) in cases {
            let mut bad = good.clone();
            bad[at] ^= 0x80;
            bad[at + 16] ^= 0x80;
            bench.fill(&blocks, &bad);
            let image = match wire {
                SigDomain::None => blocks.clone(),
                SigDomain::T10Dif(_) => interleave(&blocks, 512, &bad),
            };
            let error = SigError {
                kind,
                expected,
                actual,
                offset: 1040,
            };
            for how in OUT {
                let sent = bench.transfer_out(w, how, 0, image.len());
                assert!(sent == image, "{kind:?} {how:?}");
                assert_eq!(bench.status(w), Some(error), "{how:?}");
                assert_eq!(bench.status(w), None);
            }
        }
        bench.invalidate(w);
    }
    for mem in [PLAIN, SigDomain::T10Dif(dif)] {
        bench.register_separate(w, 5, attrs(mem, SigDomain::T10Dif(dif)));
        for (at, kind, expected, actual) in cases {
            let mut bad = good.clone();
            bad[at] ^= 0x80;
            bad[at + 16] ^= 0x80;
            for how in IN {
                bench.fill(&vec![0; blocks.len()], &vec![0; good.len()]);
                bench.transfer_in(w, how, 0, &interleave(&blocks, 512, &bad));
                assert!(bench.blocks(blocks.len()) == blocks, "{kind:?} {how:?}");
                if mem != PLAIN {
                    assert_eq!(bench.tuples(5), bad, "{kind:?} {how:?}");
                }
                let error = SigError {
                    kind,
                    expected,
                    actual,
                    offset: 1040,
                };
                assert_eq!(bench.status(w), Some(error), "{how:?}");
            }
        }
        // A flipped bit of the data is detected by the guard.
        let mut image = interleave(&blocks, 512, &good);
        image[4 * 520 + 77] ^= 1;
        bench.transfer_in(w, In::PeerWrites, 0, &image);
        let error = bench.status(w).unwrap();
        assert_eq!((error.kind, error.offset), (SigErrorKind::BadGuard, 2080));
        bench.invalidate(w);
    }
}

pub(crate) fn escapes_and_masks_limit_checks<W: World>(mut w: W) {
    let w = &mut w;
    let Some(mut bench) = bench(w) else { return };
    let blocks = pattern(4, 2 * 512);
    let all = SigCheck::all();
    let (guard, app, tag) = (SigCheck::GUARD, SigCheck::APP_TAG, SigCheck::REF_TAG);
    // Escape, mask of the application tag, checks, tuple of block 1, expected error.
    let cases = [
        (
            TagEscape::AppTag,
            0xffff,
            all,
            [0, 0, 0xff, 0xff, 0, 0, 0, 0],
            None,
        ),
        (
            TagEscape::AppTag,
            0xffff,
            all,
            [0, 0, 0xff, 0xfe, 0, 0, 0, 8],
            Some(SigErrorKind::BadGuard),
        ),
        (
            TagEscape::AppAndRefTag,
            0xffff,
            all,
            [0, 0, 0xff, 0xff, 0, 0, 0, 8],
            Some(SigErrorKind::BadGuard),
        ),
        (
            TagEscape::AppAndRefTag,
            0xffff,
            all,
            [0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
            None,
        ),
        (
            TagEscape::None,
            0xffff,
            app | tag,
            [0, 0, 0, 0, 0, 0, 0, 8],
            None,
        ),
        (
            TagEscape::None,
            0xffff,
            app | tag,
            [0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
            Some(SigErrorKind::BadRefTag),
        ),
        (
            TagEscape::None,
            0x0f00,
            app,
            [0, 0, 0x0f, 0, 0, 0, 0, 0],
            Some(SigErrorKind::BadAppTag),
        ),
        (
            TagEscape::None,
            0x0f00,
            app,
            [0, 0, 0xf0, 0xff, 0, 0, 0, 0],
            None,
        ),
        (
            TagEscape::None,
            0xffff,
            guard,
            [0, 0, 0, 0, 0, 0, 0, 8],
            Some(SigErrorKind::BadGuard),
        ),
        (TagEscape::None, 0xffff, SigCheck::empty(), [1; 8], None),
    ];
    for (escape, app_tag_check_mask, check, tuple, expected) in cases {
        let dif = T10Dif {
            escape,
            app_tag_check_mask,
            ..T10Dif::new(512, 7)
        };
        let attrs = SigAttrs { check, ..both(dif) };
        bench.register_separate(w, 2, attrs);
        let mut tuples = tuples(&blocks, 512, 0, 7);
        tuples[8..].copy_from_slice(&tuple);
        let image = interleave(&blocks, 512, &tuples);
        bench.transfer_in(w, In::PeerWrites, 0, &image);
        let got = bench.status(w).map(|error| (error.kind, error.offset));
        assert_eq!(got, expected.map(|kind| (kind, 520)), "{attrs:?} {tuple:?}");
        assert_eq!(bench.tuples(2), tuples, "{attrs:?}");
        let sent = bench.transfer_out(w, Out::PeerReads, 0, 1040);
        assert!(sent == image, "{attrs:?}");
        let got = bench.status(w).map(|error| (error.kind, error.offset));
        assert_eq!(got, expected.map(|kind| (kind, 520)), "{attrs:?} {tuple:?}");
        bench.invalidate(w);
    }
}

/// Different tags and guards in both domains. Other fields are copied, even if they are wrong.
pub(crate) fn passed_tuples_are_remapped<W: World>(mut w: W) {
    let w = &mut w;
    let Some(mut bench) = bench(w) else { return };
    let blocks = pattern(8, 3 * 512);
    let wire = T10Dif::new(512, 0xffff_ffff);
    let mem = T10Dif {
        app_tag: 9,
        ..T10Dif::new(512, 500)
    };
    let in_memory = tuples(&blocks, 512, 9, 500);
    let on_wire = tuples(&blocks, 512, 0, 0xffff_ffff);
    let image = interleave(&blocks, 512, &on_wire);
    let domains = attrs(SigDomain::T10Dif(mem), SigDomain::T10Dif(wire));
    bench.register_separate(w, 3, domains);
    bench.transfer_in(w, In::PeerWrites, 0, &image);
    assert_eq!(bench.tuples(3), in_memory);
    assert!(bench.transfer_out(w, Out::PeerReads, 0, image.len()) == image);
    assert_eq!(bench.status(w), None);
    // The guard has the same attributes in both domains, so an error is passed to the peer.
    bench.protection.write(1, &[in_memory[0] ^ 1]);
    let sent = bench.transfer_out(w, Out::Send, 0, image.len());
    assert_eq!(sent[512], image[512] ^ 1);
    assert_eq!(sent[513..], image[513..]);
    let error = bench.status(w).unwrap();
    assert_eq!((error.kind, error.offset), (SigErrorKind::BadGuard, 0));
    bench.invalidate(w);
    // The guard is converted, which hides nothing: the error is recorded.
    let mem = T10Dif {
        guard: GuardType::IpChecksum,
        ..mem
    };
    let domains = attrs(SigDomain::T10Dif(mem), SigDomain::T10Dif(wire));
    bench.register_separate(w, 3, domains);
    bench.transfer_in(w, In::Receive, 0, &image);
    assert_ne!(bench.tuples(3)[..2], in_memory[..2]);
    assert_eq!(bench.tuples(3)[2..8], in_memory[2..8]);
    assert!(bench.transfer_out(w, Out::PeerReads, 0, image.len()) == image);
    assert_eq!(bench.status(w), None);
    bench.protection.write(1, &[bench.tuples(3)[0] ^ 1]);
    assert!(bench.transfer_out(w, Out::PeerReads, 0, image.len()) == image);
    let error = bench.status(w).unwrap();
    assert_eq!((error.kind, error.offset), (SigErrorKind::BadGuard, 0));
}

/// Ranges that are not aligned to blocks, and blocks that arrive in parts.
pub(crate) fn parts_of_wire_layout_are_accessible<W: World>(mut w: W) {
    let w = &mut w;
    let Some(mut bench) = bench(w) else { return };
    let blocks = pattern(2, 8 * 512);
    let tuples = tuples(&blocks, 512, 0, 1);
    let image = interleave(&blocks, 512, &tuples);
    bench.register_separate(w, 8, both(T10Dif::new(512, 1)));
    bench.fill(&blocks, &tuples);
    for (at, len) in [
        (0, 1),
        (519, 2),
        (511, 10),
        (700, 2500),
        (520, 520),
        (4159, 1),
    ] {
        let sent = bench.transfer_out(w, Out::PeerReads, at, len);
        assert_eq!(sent, image[at..at + len], "{at}+{len}");
    }
    // The same range again: memory is read each time.
    bench.data.write(200, &[blocks[100] ^ 0xff]);
    let sent = bench.transfer_out(w, Out::PeerReads, 100, 1);
    assert_eq!(sent, [blocks[100] ^ 0xff]);
    let error = bench.status(w).unwrap();
    assert_eq!((error.kind, error.offset), (SigErrorKind::BadGuard, 0));

    bench.fill(&vec![0; blocks.len()], &vec![0; tuples.len()]);
    bench.transfer_in(w, In::PeerWrites, 300, &image[300..1300]);
    let got = bench.blocks(blocks.len());
    assert!(got[512..1024] == blocks[512..1024], "a complete block");
    assert!(got[..512].iter().chain(&got[1024..]).all(|&b| b == 0));
    bench.transfer_in(w, In::PeerWrites, 1300, &image[1300..]);
    let got = bench.blocks(blocks.len());
    assert!(got[512..] == blocks[512..]);
    assert!(got[..512].iter().all(|&b| b == 0), "an incomplete block");
    bench.transfer_in(w, In::PeerWrites, 0, &image[..300]);
    bench.transfer_in(w, In::PeerWrites, 300, &image[300..520]);
    assert!(bench.blocks(blocks.len()) == blocks);
    assert_eq!(bench.tuples(8), tuples);
    assert_eq!(bench.status(w), None);
    bench.transfer_in(w, In::PeerWrites, 521, &image[521..1040]);
    let error = bench.status(w).unwrap();
    assert_eq!((error.kind, error.offset), (SigErrorKind::Incomplete, 520));
    assert_eq!(bench.status(w), None);
    // The wire layout has a size like any other region.
    bench
        .a
        .send(w, 5, SendOp::Read(bench.mr.remote(4159)), 0, 2);
    let c = bench.a.completion(w);
    assert_eq!((c.wr_id, c.status), (WrId(5), WcStatus::RemAccessErr));
}

pub(crate) fn integrity_regions_are_invalidated_and_reused<W: World>(mut w: W) {
    let w = &mut w;
    let Some(mut bench) = bench(w) else { return };
    let dif = SigDomain::T10Dif(T10Dif::new(512, 0));
    let id = bench.mr.id;
    let blocks = pattern(6, 1024);
    let memory = [slice(&bench.data, 0, 1024)];
    bench.register(w, &memory, &[], attrs(PLAIN, dif));
    let p = w.provider(End::B);
    let mapped = p.map_mr_sg_pi(id, &memory, &[], &attrs(PLAIN, dif));
    let valid = VerbsError::InvalidState("the region is still valid");
    assert_eq!(mapped, Err(valid));
    bench.transfer_in(w, In::PeerWrites, 0, &[0x55; 520]);
    bench.invalidate(w);
    // The error is kept until it is read.
    let p = w.provider(End::B);
    let mapped = p.map_mr_sg_pi(id, &memory, &[], &attrs(PLAIN, dif));
    let unread = VerbsError::InvalidState("the region has an unread signature error");
    assert_eq!(mapped, Err(unread));
    assert_eq!(bench.status(w).unwrap().actual, 0x5555);
    // A larger region, with other attributes, and an invalidation by the peer.
    let domains = attrs(PLAIN, SigDomain::T10Dif(T10Dif::new(4096, 3)));
    let old = bench.mr;
    bench.register(w, &[slice(&bench.data, 0, 8192)], &[], domains);
    let wire = bench.transfer_out(w, Out::PeerReads, 0, 8208);
    let stored = slice(&bench.data, 0, 8192).to_vec();
    assert!(wire == interleave(&stored, 4096, &tuples(&stored, 4096, 0, 3)));
    bench.b.recv(w, 9, 0, 10);
    let op = SendOp::SendInv(bench.mr.rkey);
    bench.a.send(w, 8, op, 0, 1);
    let received = bench.b.completion(w);
    assert_eq!(received.invalidated, Some(bench.mr.rkey));
    ok(w, &bench.a, WcOpcode::Send, 8);
    assert_eq!(bench.status(w), None);
    // A block that was incomplete when the region was invalidated starts again.
    bench.register(w, &memory, &[], attrs(PLAIN, dif));
    bench.data.fill(0, 1024, 0);
    let image = interleave(&blocks, 512, &tuples(&blocks, 512, 0, 0));
    bench.transfer_in(w, In::PeerWrites, 0, &image[..519]);
    bench.invalidate(w);
    assert_eq!(bench.status(w).unwrap().kind, SigErrorKind::Incomplete);
    bench.register(w, &memory, &[], attrs(PLAIN, dif));
    bench.transfer_in(w, In::PeerWrites, 519, &image[519..520]);
    assert_eq!(memory[0].to_vec(), [0; 1024]);
    bench.transfer_in(w, In::PeerWrites, 0, &image);
    assert!(memory[0].to_vec() == blocks);
    // The old key is invalid.
    bench.a.send(w, 5, SendOp::Read(old.remote(0)), 0, 2);
    let c = bench.a.completion(w);
    assert_eq!((c.wr_id, c.status), (WrId(5), WcStatus::RemAccessErr));
    w.provider(End::B).dereg_mr(id).unwrap();
    let gone = VerbsError::InvalidHandle("memory region");
    assert_eq!(w.provider(End::B).check_mr_status(id), Err(gone));
}

pub(crate) fn invalid_signature_attributes_are_refused<W: World>(mut w: W) {
    let w = &mut w;
    let Some(bench) = bench(w) else { return };
    let limit = w.provider(End::B).device_attr().max_fast_reg_segments;
    let p = w.provider(End::B);
    let number = VerbsError::InvalidParameter("number of segments");
    for (data, protection) in [(0, 1), (limit + 1, 1), (1, limit + 1)] {
        let refused = p.alloc_mr_integrity(bench.b.pd, data, protection);
        assert_eq!(refused, Err(number));
    }
    let largest = p.alloc_mr_integrity(bench.b.pd, limit, limit).unwrap();
    p.dereg_mr(largest.id).unwrap();
    let id = bench.mr.id;
    let dif = SigDomain::T10Dif(T10Dif::new(512, 0));
    let of = |interval| SigDomain::T10Dif(T10Dif::new(interval, 0));
    let data = |len| vec![slice(&bench.data, 0, len)];
    let tuples = |len| vec![slice(&bench.protection, 0, len)];
    let cases = [
        (
            attrs(PLAIN, PLAIN),
            data(512),
            vec![],
            "signature domains: no protection information",
        ),
        (
            attrs(of(512), of(4096)),
            data(4096),
            tuples(8),
            "protection intervals: different in memory and on the wire",
        ),
        (
            attrs(PLAIN, of(520)),
            data(520),
            vec![],
            "protection interval: neither 512 nor 4096",
        ),
        (
            attrs(PLAIN, dif),
            data(512),
            tuples(8),
            "protection segments: no protection information in memory",
        ),
        (
            attrs(PLAIN, dif),
            data(513),
            vec![],
            "size of the data segments: not a multiple of the block size",
        ),
        (
            attrs(dif, PLAIN),
            data(512),
            vec![],
            "size of the data segments: not a multiple of the block size",
        ),
        (
            attrs(PLAIN, dif),
            vec![],
            vec![],
            "size of the data segments: not a multiple of the block size",
        ),
        (
            attrs(dif, dif),
            data(1024),
            tuples(8),
            "size of the protection segments: not 8 bytes for each block",
        ),
        (
            attrs(PLAIN, dif),
            (0..8).map(|i| slice(&bench.data, i * 128, 64)).collect(),
            vec![],
            "number of segments",
        ),
    ];
    for (attrs, data, protection, error) in cases {
        let refused = p.map_mr_sg_pi(id, &data, &protection, &attrs);
        assert_eq!(refused, Err(VerbsError::InvalidParameter(error)));
    }
    let wrong = VerbsError::InvalidState("not an integrity region");
    let refused = p.map_mr_sg_pi(bench.b.mr.id, &data(512), &[], &attrs(PLAIN, dif));
    assert_eq!(refused, Err(wrong));
    assert_eq!(p.check_mr_status(bench.b.mr.id), Err(wrong));
    // An integrity region has no other mapping, and atomics are not possible.
    let refused = p.map_mr_sg(id, &data(512));
    let wrong = VerbsError::InvalidState("not a fast-registration region");
    assert_eq!(refused, Err(wrong));
    assert_eq!(p.check_mr_status(id), Ok(None));
    p.map_mr_sg_pi(id, &data(512), &[], &attrs(PLAIN, dif))
        .unwrap();
    let op = SendOp::RegMr {
        mr: id,
        key: bench.mr.rkey.next(),
        access: RIGHTS | Access::REMOTE_ATOMIC,
    };
    p.post_send(bench.b.qp, &[SendWr::new(6, op, &[])]).unwrap();
    let c = bench.b.completion(w);
    assert_eq!((c.wr_id, c.status), (WrId(6), WcStatus::MwBindErr));
}
