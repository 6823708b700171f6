//! Random histories: no message causes a panic, credits are conserved, and each request completes
//! exactly once.

use proptest::prelude::*;
use riser_scsi::srp::{MemDesc, TaskAttr, TskMgmtFunction};
use riser_testkit::{fuzz, one_of};

use super::channel::{ChState, Channel};
use crate::tests::rig;
use crate::tests::rig::srp::{
    Data, KEY, SrpPeer, TABLE, blocks, cmd, params, read10, table_bytes, tmf, write10,
};

type Rig = rig::Rig<SrpPeer>;

#[derive(Clone, Debug)]
enum Step {
    /// Arbitrary bytes.
    Garbage(usize, Vec<u8>),
    /// A valid command with at most one byte changed.
    Mutated(Box<Step>, u16, u8),
    Read {
        chan: usize,
        lba: u8,
        blocks: u8,
        shape: u8,
        attr: u8,
    },
    Write {
        chan: usize,
        lba: u8,
        blocks: u8,
        shape: u8,
        attr: u8,
    },
    Other(usize, u8),
    Tmf(usize, u8, u8),
    Complete(u8, bool),
    Disconnect(usize),
    Terminate(usize),
    Starve(u8),
    Time(u8),
    Limit(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let chan = 0..2usize;
    let legal = one_of![
        (chan.clone(), any::<u8>(), 0u8..40, any::<u8>(), 0u8..8).prop_map(
            |(chan, lba, blocks, shape, attr)| Step::Read {
                chan,
                lba,
                blocks,
                shape,
                attr
            }
        ),
        (chan.clone(), any::<u8>(), 0u8..40, any::<u8>(), 0u8..8).prop_map(
            |(chan, lba, blocks, shape, attr)| Step::Write {
                chan,
                lba,
                blocks,
                shape,
                attr
            }
        ),
        (chan.clone(), any::<u8>()).prop_map(|(c, o)| Step::Other(c, o)),
        (chan.clone(), any::<u8>(), 0u8..6).prop_map(|(c, f, t)| Step::Tmf(c, f, t)),
    ];
    let mutated = (legal.clone(), any::<u16>(), any::<u8>())
        .prop_map(|(s, at, v)| Step::Mutated(Box::new(s), at, v));
    one_of![
        10 => legal,
        3 => mutated,
        1 => (chan.clone(), proptest::collection::vec(any::<u8>(), 0..200))
            .prop_map(|(c, b)| Step::Garbage(c, b)),
        20 => (any::<u8>(), proptest::bool::weighted(0.97)).prop_map(|(n, ok)| Step::Complete(n, ok)),
        1 => chan.clone().prop_map(Step::Disconnect),
        1 => chan.prop_map(Step::Terminate),
        1 => any::<u8>().prop_map(Step::Starve),
        2 => any::<u8>().prop_map(Step::Time),
        1 => any::<u8>().prop_map(Step::Limit),
    ]
}

/// Returns a buffer of `len` bytes, in one of several formats.
fn data(shape: u8, len: u32) -> Data {
    let n = len.div_ceil(512).max(1);
    let descs = blocks(n);
    let inline = match shape % 8 {
        0 => return Data::None,
        1 => return Data::Immediate(vec![shape; (len as usize).min(8000)]),
        2 | 3 => return Data::direct(len),
        4 => 0,
        5 => n as usize / 2,
        _ => n as usize,
    };
    Data::Indirect {
        table: MemDesc::new(0, TABLE, n * 16),
        len: len.saturating_sub(u32::from(shape == 255)),
        inline: descs[..inline].to_vec(),
    }
}

fn attr(a: u8) -> TaskAttr {
    match a {
        0 => TaskAttr::Ordered,
        1 => TaskAttr::HeadOfQueue,
        2 => TaskAttr::Aca,
        _ => TaskAttr::Simple,
    }
}

/// Returns the information unit for a step, and its channel.
fn iu(step: &Step, tag: u64) -> Option<(usize, Vec<u8>)> {
    Some(match step {
        Step::Garbage(chan, bytes) => (*chan, bytes.clone()),
        Step::Mutated(inner, at, value) => {
            let (chan, mut bytes) = iu(inner, tag)?;
            let at = usize::from(*at) % bytes.len().min(96);
            bytes[at] = *value;
            (chan, bytes)
        }
        Step::Read {
            chan,
            lba,
            blocks,
            shape,
            attr: a,
        } => {
            let into = match data(*shape, u32::from(*blocks) * 512) {
                Data::Immediate(_) => Data::None,
                other => other,
            };
            let c = read10(u32::from(*lba) * 16, (*blocks).into()).into(into);
            (*chan, c.tag(tag).attr(attr(*a)).bytes())
        }
        Step::Write {
            chan,
            lba,
            blocks,
            shape,
            attr: a,
        } => {
            let out = data(*shape, u32::from(*blocks) * 512);
            let c = write10(u32::from(*lba) * 16, (*blocks).into()).out(out);
            (*chan, c.tag(tag).attr(attr(*a)).bytes())
        }
        Step::Other(chan, op) => {
            let into = Data::direct(255);
            (
                *chan,
                cmd(&[*op, 0, 0, 0, 255, 0]).tag(tag).into(into).bytes(),
            )
        }
        Step::Tmf(chan, function, back) => {
            let function = match function % 6 {
                0 | 1 => TskMgmtFunction::AbortTask,
                2 => TskMgmtFunction::AbortTaskSet,
                3 => TskMgmtFunction::ClearTaskSet,
                4 => TskMgmtFunction::LogicalUnitReset,
                _ => TskMgmtFunction::Other(*function),
            };
            let named = tag.saturating_sub(u64::from(*back));
            (*chan, tmf(tag, 0, function, named))
        }
        _ => return None,
    })
}

fn windows() -> impl Strategy<Value = u32> {
    one_of![Just(512_u32), Just(2560), Just(1 << 20)]
}

/// Each request should complete exactly once, and no resources should be left.
fn run(steps: &[Step], window: u32) {
    let mut rig = Rig::with_window(window);
    rig.add_channel(params(), 2);
    rig.establish(1);
    rig.memory.insert(TABLE, table_bytes(&blocks(40)));
    let mut starved = None;
    for (tag, step) in steps.iter().enumerate() {
        rig.memory.insert(KEY, vec![0x5a; 64 << 10]);
        if let Some((chan, bytes)) = iu(step, tag as u64) {
            rig.send(chan, &bytes);
        }
        match step {
            Step::Complete(n, ok) if !rig.work.is_empty() => {
                let n = usize::from(*n) % rig.work.len();
                rig.complete_nth(n, *ok);
            }
            Step::Disconnect(chan) => rig.with(*chan, Channel::handle_disconnected),
            Step::Terminate(chan) => {
                rig.with(*chan, super::Channel::handle_terminate);
            }
            Step::Starve(n) => {
                if let Some(buffer) = starved.take() {
                    rig.pool.release(buffer);
                    rig.pump();
                } else if n % 2 == 0 {
                    let free = rig.pool.free() as u32;
                    starved = rig.pool.allocate(free.min(4 << 20));
                }
            }
            Step::Time(ms) => {
                rig.advance(std::time::Duration::from_millis(u64::from(*ms) * 20));
            }
            Step::Limit(n) => {
                rig.units[0].limits.set(&crate::qos::fixture::limits(*n));
                for chan in 0..2 {
                    rig.with(chan, Channel::handle_limits);
                }
            }
            _ => {}
        }
        for channel in rig.peers.iter().map(|peer| &peer.channel) {
            let lim = &channel.sender().req_lim;
            assert_eq!(
                lim.at_initiator() + i64::from(lim.outstanding()) + i64::from(lim.owed()),
                i64::from(lim.limit())
            );
            if channel.state() == ChState::Live {
                let c = channel.stats().counters;
                assert_eq!(c.torn_down, 0);
            }
        }
    }
    if let Some(buffer) = starved {
        rig.pool.release(buffer);
    }
    rig.pump();
    while !rig.work.is_empty() {
        rig.complete();
    }
    rig.close();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn requests_complete_once_without_leaks(
        steps in proptest::collection::vec(step(), 1..120),
        window in windows(),
    ) {
        run(&steps, window);
    }
}

#[test]
fn srp_channel() {
    bolero::check!(name = "srp_channel").for_each(|bytes: &[u8]| {
        if let Some((window, steps)) = fuzz::history(&windows(), &step(), bytes) {
            run(&steps, window);
        }
    });
}
