//! Random actions on a live connection: for any order of initiator, disk and device operations,
//! there are no panics, memory usage is limited, and all resources are released in the end.

use proptest::prelude::*;
use riser_scsi::iscsi::Itt;
use riser_scsi::iscsi::pdu::TmfFunction;
use riser_scsi::iser::{Buffers, Header};
use riser_testkit::{fuzz, one_of};

use crate::iscsi::{Datamover as _, MAX_QUEUED};
use crate::tests::rig;
use crate::tests::rig::iser::{IserPeer, WINDOW, remote_buffer};
use crate::worker::fabrics::Input;

type Rig = rig::Rig<IserPeer>;

#[derive(Clone, Debug)]
enum Step {
    /// Send a read: tag, blocks.
    Read(u8, u8),
    /// Send a write: tag, blocks, immediate bytes, followed by unsolicited bytes.
    Write(u8, u8, u16, u16),
    /// Send unsolicited data: tag, DataSN, offset, length, final flag.
    DataOut(u8, u8, u16, u16, bool),
    /// Abort a tag, or all tags.
    Abort(u8, bool),
    Nop(u8),
    /// Complete a block operation.
    Block(u8),
    /// Complete the oldest chain.
    Chain,
    /// Resume or suspend the device.
    Stall(bool),
    /// Send random bytes after a header with random buffers.
    Bytes(Option<u32>, Vec<u8>),
    /// Send random bytes.
    Noise(Vec<u8>),
    /// Wait for this number of seconds.
    Wait(u8),
    /// Change the limits of the unit.
    Limit(u8),
    Logout,
}

fn step() -> impl Strategy<Value = Step> {
    let tag = || 0u8..6;
    one_of![
        16 => (tag(), 1u8..130).prop_map(|(t, b)| Step::Read(t, b)),
        24 => (tag(), 1u8..130, 0u16..9000, 0u16..17000).prop_map(|(t, b, i, u)| Step::Write(t, b, i, u)),
        16 => (tag(), 0u8..3, 0u16..17000, 0u16..8193, any::<bool>())
            .prop_map(|(t, s, o, l, f)| Step::DataOut(t, s, o, l, f)),
        6 => (tag(), any::<bool>()).prop_map(|(t, all)| Step::Abort(t, all)),
        4 => tag().prop_map(Step::Nop),
        24 => any::<u8>().prop_map(Step::Block),
        24 => Just(Step::Chain),
        8 => any::<bool>().prop_map(Step::Stall),
        1 => (any::<Option<u32>>(), proptest::collection::vec(any::<u8>(), 48..200))
            .prop_map(|(b, v)| Step::Bytes(b, v)),
        1 => proptest::collection::vec(any::<u8>(), 0..120).prop_map(Step::Noise),
        1 => (0u8..20).prop_map(Step::Wait),
        2 => any::<u8>().prop_map(Step::Limit),
        1 => Just(Step::Logout),
    ]
}

fn run_step(rig: &mut Rig, step: Step) {
    if rig.receives() == 0 && !matches!(step, Step::Block(_) | Step::Chain | Step::Stall(_)) {
        return;
    }
    if let Step::Read(tag, _) | Step::Write(tag, ..) = step {
        // Each tag is used for a single command at a time, and the window isn't exceeded.
        // Violations are tested by scripts.
        let channel = rig.conn.channel();
        let is_used = channel.executor().task_state(Itt(tag.into())).is_some();
        if is_used || channel.executor().in_flight() >= usize::from(WINDOW) {
            return;
        }
    }
    let data = vec![0x5a; 130 * 512];
    match step {
        Step::Read(tag, blocks) => {
            rig.read(tag.into(), 0, blocks.into());
        }
        Step::Write(tag, blocks, immediate, unsolicited) => {
            let data = &data[..usize::from(blocks) * 512];
            let immediate = usize::from(immediate).min(8192).min(data.len());
            let solicited = (immediate + usize::from(unsolicited)).min(data.len());
            rig.write(tag.into(), data, immediate, solicited);
        }
        Step::DataOut(tag, sn, offset, len, is_final) => {
            let data = &data[..usize::from(len)];
            rig.data_out(tag.into(), sn.into(), offset.into(), data, is_final);
        }
        Step::Abort(tag, all) => {
            let function = if all {
                TmfFunction::LogicalUnitReset
            } else {
                TmfFunction::AbortTask
            };
            rig.tmf(200 + u32::from(tag), function, tag.into());
        }
        Step::Nop(tag) => {
            rig.nop(300 + u32::from(tag), &[1, 2, 3]);
        }
        Step::Block(at) if !rig.blocks().is_empty() => {
            rig.finish_block(usize::from(at) % rig.blocks().len());
            rig.run_actions();
        }
        Step::Chain => {
            rig.finish_chain(true);
            rig.run_actions();
        }
        Step::Stall(stalled) => {
            rig.stalled = stalled;
            rig.run_actions();
        }
        Step::Bytes(stag, bytes) => {
            // Use existing keys only, because a device would reject other keys.
            let buffer = stag.map(|_| remote_buffer(0xffff));
            let header = Header::Control(Buffers {
                write: buffer,
                read: buffer,
            });
            let mut message = header.bytes().to_vec();
            message.extend_from_slice(&bytes);
            rig.memory.insert(0xffff, vec![0; 1 << 20]);
            rig.send_bytes(&message);
        }
        Step::Noise(bytes) => {
            rig.send_bytes(&bytes);
        }
        Step::Wait(seconds) => {
            rig.wait(std::time::Duration::from_secs(seconds.into()));
        }
        Step::Limit(n) => {
            rig.units[0].limits.set(&crate::qos::fixture::limits(n));
            rig.apply(Input::Limits);
        }
        Step::Logout => {
            rig.log_out();
        }
        Step::Block(_) => {}
    }
}

fn windows() -> impl Strategy<Value = u32> {
    one_of![Just(512_u32), Just(20_480), Just(1 << 20)]
}

/// All resources are released after any sequence of steps.
fn run(steps: Vec<Step>, prompt: bool, window: u32) {
    let mut rig = Rig::with_window(window, "");
    rig.prompt = prompt;
    for step in steps {
        if rig.in_error {
            break;
        }
        run_step(&mut rig, step);
        let queued = rig.conn.channel().mover().queued();
        assert!(queued <= MAX_QUEUED + 64, "{queued}");
    }
    if !rig.in_error {
        rig.apply(Input::Disconnected);
    }
    rig.check_gone();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn random_history_releases_all_resources(
        steps in proptest::collection::vec(step(), 1..80),
        prompt in any::<bool>(),
        window in windows(),
    ) {
        run(steps, prompt, window);
    }
}

#[test]
fn iser_channel() {
    bolero::check!(name = "iser_channel").for_each(|bytes: &[u8]| {
        let head = (any::<bool>(), windows());
        if let Some(((prompt, window), steps)) = fuzz::history(&head, &step(), bytes) {
            run(steps, prompt, window);
        }
    });
}
