use super::*;

const A: Port = Port(1);
const B: Port = Port(2);

/// Used to write a single block and to read it with the data of a given write.
struct Disk {
    history: History,
    data: HashMap<WriteId, Vec<u8>>,
}

impl Disk {
    fn new() -> Self {
        Self {
            history: History::new(4),
            data: HashMap::new(),
        }
    }

    fn begin(&mut self, port: Port) -> WriteId {
        let mut bytes = vec![0; BLOCK];
        let id = self.history.begin_write(port, 1..2, &mut bytes);
        self.data.insert(id, bytes);
        id
    }

    fn begin_swap(&mut self, port: Port) -> WriteId {
        let mut bytes = vec![0; BLOCK];
        let id = self.history.begin_swap(port, 1, &mut bytes);
        self.data.insert(id, bytes);
        id
    }

    fn write(&mut self, port: Port) -> WriteId {
        let id = self.begin(port);
        self.history.acknowledge(id).unwrap();
        id
    }

    fn read(&self, port: Port, seen: Option<WriteId>) -> Result<(), Violation> {
        let read = self.history.begin_read(port, 1..2);
        self.end(read, seen)
    }

    fn end(&self, read: ReadId, seen: Option<WriteId>) -> Result<(), Violation> {
        let nothing = vec![0; BLOCK];
        let bytes = seen.map_or(&nothing, |id| &self.data[&id]);
        self.history.end_read(read, bytes)
    }
}

fn is_refused(result: Result<(), Violation>) -> bool {
    matches!(
        result,
        Err(Violation::Stale { .. } | Violation::Disorder { .. })
    )
}

#[test]
fn the_latest_acknowledged_write_is_read() {
    let mut disk = Disk::new();
    disk.read(A, None).unwrap();
    let one = disk.write(A);
    disk.read(B, Some(one)).unwrap();
    assert!(is_refused(disk.read(B, None)), "nothing, after a write");
    let mut disk = Disk::new();
    let one = disk.write(A);
    let two = disk.write(B);
    disk.read(A, Some(two)).unwrap();
    assert!(is_refused(disk.read(A, Some(one))), "an older version");
}

#[test]
fn an_acknowledged_write_that_never_took_effect_is_found() {
    let mut disk = Disk::new();
    let one = disk.write(A);
    let _two = disk.write(A);
    assert!(is_refused(disk.read(B, Some(one))));
}

#[test]
fn a_concurrent_write_may_be_read_or_not_but_not_go_and_come() {
    let mut disk = Disk::new();
    let one = disk.write(A);
    let two = disk.begin(B);
    disk.read(A, Some(one)).unwrap();
    disk.read(A, Some(two)).unwrap();
    assert!(
        is_refused(disk.read(A, Some(one))),
        "it has been seen to be over"
    );

    let mut disk = Disk::new();
    let one = disk.write(A);
    let two = disk.begin(B);
    disk.read(A, Some(one)).unwrap();
    disk.history.acknowledge(two).unwrap();
    disk.read(A, Some(two)).unwrap();
}

#[test]
fn concurrent_writes_have_one_order_for_all_readers() {
    let mut disk = Disk::new();
    let (one, two) = (disk.begin(A), disk.begin(B));
    disk.history.acknowledge(one).unwrap();
    disk.history.acknowledge(two).unwrap();
    disk.read(A, Some(one)).unwrap();
    disk.read(B, Some(one)).unwrap();
    assert!(
        is_refused(disk.read(B, Some(two))),
        "it was before the other"
    );
}

#[test]
fn an_acknowledgement_can_be_what_does_not_fit() {
    let mut disk = Disk::new();
    let one = disk.write(A);
    let read = disk.history.begin_read(B, 1..2);
    let two = disk.begin(A);
    disk.end(read, Some(one)).unwrap();
    let late = disk.history.begin_read(B, 1..2);
    disk.history.acknowledge(two).unwrap();
    disk.end(late, Some(one)).unwrap();
    // One read starts while a write is pending, and another read starts after it has completed.
    let mut disk = Disk::new();
    let one = disk.write(A);
    let two = disk.begin(A);
    disk.read(B, Some(two)).unwrap();
    let three = disk.begin(B);
    disk.history.acknowledge(three).unwrap();
    disk.read(B, Some(two)).unwrap_err();
    let _ = one;
}

#[test]
fn lost_write_may_execute_until_port_responds() {
    let mut disk = Disk::new();
    let one = disk.begin(A);
    disk.history.lose(one);
    let two = disk.write(B);
    disk.read(B, Some(two)).unwrap();
    // We don't know yet if it has completed.
    disk.read(B, Some(one)).unwrap();
    assert!(is_refused(disk.read(B, Some(two))), "and back");

    let mut disk = Disk::new();
    let one = disk.begin(A);
    disk.history.lose(one);
    let two = disk.write(B);
    disk.read(A, Some(two)).unwrap();
    assert_eq!(
        disk.history.lost(),
        0,
        "a command of its port has a response"
    );
    let three = disk.write(B);
    disk.read(B, Some(three)).unwrap();
    assert!(
        is_refused(disk.read(B, Some(one))),
        "a stale write after a login"
    );
}

#[test]
fn a_lost_write_that_took_effect_is_there_until_it_is_overwritten() {
    let mut disk = Disk::new();
    let one = disk.begin(A);
    disk.history.lose(one);
    disk.read(A, Some(one)).unwrap();
    disk.read(B, Some(one)).unwrap();
    assert!(is_refused(disk.read(B, None)), "it was there");
}

/// A command that was sent before the loss must not be treated as a fence.
#[test]
fn earlier_command_response_is_no_fence() {
    let mut disk = Disk::new();
    let read = disk.history.begin_read(A, 1..2);
    let one = disk.begin(A);
    disk.history.lose(one);
    disk.end(read, None).unwrap();
    assert_eq!(disk.history.lost(), 1);
    let other = disk.write(B);
    disk.read(B, Some(other)).unwrap();
    assert_eq!(disk.history.lost(), 1, "nor one of another port");
    disk.read(B, Some(one)).unwrap();
}

#[test]
fn with_several_paths_a_fence_is_one_for_its_blocks() {
    for (by_block, blocks, left) in [(false, 2..3, 0), (true, 2..3, 1), (true, 1..2, 0)] {
        let mut disk = Disk::new();
        if by_block {
            disk.history = disk.history.with_paths();
        }
        let one = disk.begin(A);
        disk.history.lose(one);
        let read = disk.history.begin_read(A, blocks);
        disk.history.end_read(read, &[0; BLOCK]).unwrap();
        assert_eq!(disk.history.lost(), left);
    }
}

/// If a read was started before a write, it can return the version overwritten by it, even if the
/// completion of this read also completes a lost write.
#[test]
fn a_fence_forgets_nothing_that_its_read_may_see() {
    let mut disk = Disk::new();
    let one = disk.write(B);
    let lost = disk.begin(A);
    disk.history.lose(lost);
    let read = disk.history.begin_read(A, 1..2);
    let two = disk.write(B);
    disk.end(read, Some(one)).unwrap();
    disk.read(A, Some(two)).unwrap();
    assert!(is_refused(disk.read(B, Some(one))), "overwritten by then");
}

#[test]
fn a_refused_write_may_have_taken_effect_but_does_not_later() {
    let mut disk = Disk::new();
    let one = disk.begin(A);
    disk.history.refuse(one);
    disk.read(B, Some(one)).unwrap();
    let mut disk = Disk::new();
    let one = disk.begin(A);
    disk.history.refuse(one);
    disk.read(B, None).unwrap();
    assert!(
        is_refused(disk.read(B, Some(one))),
        "after it was seen not to be there"
    );
    let mut disk = Disk::new();
    let one = disk.begin(A);
    disk.history.refuse(one);
    let two = disk.write(B);
    disk.read(B, Some(two)).unwrap();
    assert!(is_refused(disk.read(B, Some(one))));
}

/// A write that is retried can be returned again until it's acknowledged, but not while the block
/// must contain a different version.
#[test]
fn repeated_write_may_reappear_until_completion() {
    let story = |history: History| {
        let mut disk = Disk {
            history,
            data: HashMap::new(),
        };
        let one = disk.begin(A);
        disk.read(B, Some(one))?;
        let two = disk.write(B);
        disk.read(B, Some(two))?;
        disk.read(B, Some(one))?;
        disk.history.acknowledge(one)?;
        let three = disk.write(B);
        disk.read(B, Some(three))?;
        Ok((disk, one, two, three))
    };
    assert!(is_refused(story(History::new(4)).map(drop)));
    let new = || story(History::new(4).with_repeats()).unwrap();
    let (disk, one, ..) = new();
    assert!(is_refused(disk.read(B, Some(one))), "it was acknowledged");
    let (disk, _, two, _) = new();
    assert!(is_refused(disk.read(B, Some(two))));

    let mut disk = Disk::new();
    disk.history = disk.history.with_repeats();
    let one = disk.write(A);
    let two = disk.begin(B);
    disk.read(A, Some(two)).unwrap();
    disk.read(A, Some(one)).unwrap_err();

    let mut disk = Disk::new();
    disk.history = disk.history.with_repeats();
    let one = disk.write(A);
    disk.read(A, Some(one)).unwrap();
    let two = disk.begin(B);
    let long = disk.history.begin_read(A, 1..2);
    disk.read(B, Some(two)).unwrap();
    disk.end(long, Some(two)).unwrap();
    assert!(
        is_refused(disk.read(A, Some(one))),
        "it was there throughout"
    );
}

#[test]
fn a_block_is_whole_and_in_its_place() {
    let history = History::new(4);
    let (mut one, mut two) = (vec![0; 2 * BLOCK], vec![0; 2 * BLOCK]);
    let ids = [
        history.begin_write(A, 1..3, &mut one),
        history.begin_write(B, 1..3, &mut two),
    ];
    for id in ids {
        history.acknowledge(id).unwrap();
    }
    let see = |bytes: &[u8]| {
        let read = history.begin_read(A, 1..3);
        history.end_read(read, bytes)
    };
    // If the writes are concurrent, a mix of whole blocks is allowed.
    let mixed = [&one[..BLOCK], &two[BLOCK..]].concat();
    see(&mixed).unwrap();
    let mut torn = mixed.clone();
    torn[256..BLOCK].copy_from_slice(&two[256..BLOCK]);
    assert!(matches!(
        see(&torn),
        Err(Violation::Torn {
            block: 1,
            byte: 256,
            ..
        })
    ));
    let mut spoilt = mixed.clone();
    spoilt[2 * BLOCK - 1] ^= 1;
    assert!(matches!(
        see(&spoilt),
        Err(Violation::Torn {
            block: 2,
            byte: 511,
            ..
        })
    ));
    let moved = [&one[BLOCK..], &two[..BLOCK]].concat();
    assert!(matches!(see(&moved), Err(Violation::Torn { block: 1, .. })));
    let mut half = mixed;
    half[..16].fill(0);
    assert!(matches!(see(&half), Err(Violation::Torn { block: 1, .. })));
}

#[test]
fn what_was_never_written_is_not_read() {
    let mut disk = Disk::new();
    let mut other = Disk::new();
    for _ in 0..3 {
        other.write(B);
    }
    let foreign = other.write(B);
    disk.write(A);
    let read = disk.history.begin_read(A, 1..2);
    let result = disk.history.end_read(read, &other.data[&foreign]);
    assert!(matches!(result, Err(Violation::Stale { block: 1, .. })));
}

impl Disk {
    fn with_power_cuts() -> Self {
        Self {
            history: History::new(4).with_repeats().with_power_cuts(),
            data: HashMap::new(),
        }
    }

    fn write_durable(&mut self, port: Port) -> WriteId {
        let id = self.begin(port);
        self.history.acknowledge_durable(id).unwrap();
        id
    }

    fn flush(&self, port: Port) -> Result<(), Violation> {
        let id = self.history.begin_flush(port);
        self.history.end_flush(id)
    }

    fn fail_flush(&self, port: Port) {
        let id = self.history.begin_flush(port);
        self.history.fail_flush(id);
    }
}

#[test]
fn a_block_that_was_not_flushed_holds_any_version_since_the_last_flush() {
    for seen in 0..4 {
        let mut disk = Disk::with_power_cuts();
        let lost = disk.write(A);
        let old = disk.write(A);
        disk.flush(B).unwrap();
        let one = disk.write(B);
        let two = disk.write(A);
        disk.history.power_cut();
        let seen = [old, one, two, lost][seen];
        assert_eq!(disk.read(A, Some(seen)).is_ok(), seen != lost);
        assert!(is_refused(disk.read(A, None)), "before the flush");
        // After a version was read, it must not change, even if there is another power failure.
        if seen != lost {
            disk.history.power_cut();
            for other in [old, one, two] {
                assert_eq!(disk.read(A, Some(other)).is_ok(), other == seen);
            }
        }
    }
}

#[test]
fn a_block_does_not_change_after_a_power_cut() {
    let mut disk = Disk::with_power_cuts();
    let one = disk.write(A);
    disk.history.power_cut();
    disk.read(A, None).unwrap();
    assert!(is_refused(disk.read(A, Some(one))), "it was lost");
    let mut disk = Disk::with_power_cuts();
    disk.write(A);
    disk.history.power_cut();
    disk.read(A, None).unwrap();
    let two = disk.write(B);
    disk.read(A, Some(two)).unwrap();
    assert!(is_refused(disk.read(A, None)), "overwritten");
}

#[test]
fn a_third_value_is_found_after_a_power_cut() {
    let mut disk = Disk::with_power_cuts();
    let one = disk.write(A);
    disk.flush(A).unwrap();
    let two = disk.write(A);
    disk.history.power_cut();
    let mut torn = disk.data[&one].clone();
    torn[256..].copy_from_slice(&disk.data[&two][256..]);
    let read = disk.history.begin_read(A, 1..2);
    let result = disk.history.end_read(read, &torn);
    assert!(matches!(result, Err(Violation::Torn { block: 1, .. })));
}

#[test]
fn what_is_durable_is_not_lost() {
    // Test a flush from any port, FUA, and both in sequence.
    let mut disk = Disk::with_power_cuts();
    let one = disk.write(A);
    disk.flush(B).unwrap();
    disk.history.power_cut();
    assert!(is_refused(disk.read(A, None)), "an acknowledged flush");
    disk.read(A, Some(one)).unwrap();
    let two = disk.write_durable(B);
    disk.history.power_cut();
    assert!(is_refused(disk.read(A, Some(one))), "an acknowledged FUA");
    disk.read(A, Some(two)).unwrap();
}

#[test]
fn a_flush_covers_only_what_was_acknowledged_before_it_began() {
    let mut disk = Disk::with_power_cuts();
    let write = disk.begin(A);
    let flush = disk.history.begin_flush(A);
    disk.history.acknowledge(write).unwrap();
    disk.history.end_flush(flush).unwrap();
    disk.history.power_cut();
    disk.read(A, None).unwrap();
    // A flush that failed or has no response is not enough either.
    let mut disk = Disk::with_power_cuts();
    disk.write(A);
    disk.fail_flush(A);
    let _unanswered = disk.history.begin_flush(A);
    disk.history.power_cut();
    disk.read(A, None).unwrap();
}

#[test]
fn write_acknowledged_across_power_cut_may_be_lost() {
    for is_durable in [false, true] {
        let mut disk = Disk::with_power_cuts();
        let old = disk.write(A);
        let id = disk.begin(A);
        disk.history.power_cut();
        match is_durable {
            true => disk.history.acknowledge_durable(id).unwrap(),
            false => disk.history.acknowledge(id).unwrap(),
        }
        assert_eq!(disk.read(B, Some(old)).is_ok(), !is_durable);
    }
    // There can be another write after a durable write, before its response and before the power
    // failure.
    let mut disk = Disk::with_power_cuts();
    let id = disk.begin(A);
    let later = disk.write(B);
    disk.history.power_cut();
    disk.history.acknowledge_durable(id).unwrap();
    disk.read(B, Some(later)).unwrap();
}

#[test]
fn a_read_across_a_power_cut_may_have_seen_either_side() {
    let mut disk = Disk::with_power_cuts();
    let one = disk.write(A);
    let (before, after) = (
        disk.history.begin_read(B, 1..2),
        disk.history.begin_read(B, 1..2),
    );
    disk.history.power_cut();
    disk.end(before, Some(one)).unwrap();
    disk.end(after, None).unwrap();
    disk.read(B, None).unwrap();
}

#[test]
fn a_flush_after_a_power_cut_that_hides_a_loss_is_found() {
    let is_lost = |result| matches!(result, Err(Violation::Lost { block: 1, .. }));
    // The flush is started before or after the power failure, and the loss is read before or after
    // the response.
    for (is_across, is_read_first) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut disk = Disk::with_power_cuts();
        disk.write(A);
        let across = is_across.then(|| disk.history.begin_flush(A));
        disk.history.power_cut();
        let flush = across.unwrap_or_else(|| disk.history.begin_flush(A));
        if is_read_first {
            disk.read(B, None).unwrap();
            assert!(is_lost(disk.history.end_flush(flush)));
        } else {
            disk.history.end_flush(flush).unwrap();
            assert!(is_refused(disk.read(B, None)));
        }
    }
    // A flush that failed has reported the loss, and a flush doesn't include writes from other
    // ports.
    let mut disk = Disk::with_power_cuts();
    disk.write(A);
    disk.history.power_cut();
    disk.read(B, None).unwrap();
    disk.flush(B).unwrap();
    disk.fail_flush(A);
    disk.flush(A).unwrap();
}

#[test]
fn a_flush_of_any_port_that_hides_a_lost_write_back_is_found() {
    let is_lost = |result| matches!(result, Err(Violation::Lost { block: 1, .. }));
    for port in [A, B] {
        let mut disk = Disk::with_power_cuts();
        disk.write(A);
        disk.history.lose_write_back([1]);
        disk.read(B, None).unwrap();
        // If a port was notified, this doesn't notify any other port.
        disk.fail_flush(port);
        assert!(is_lost(disk.flush(port)));
        // The loss can be found after the flush.
        let mut disk = Disk::with_power_cuts();
        disk.write(A);
        disk.history.lose_write_back([1]);
        disk.flush(port).unwrap();
        assert!(is_refused(disk.read(B, None)));
        // After the administrator was notified, a flush must include later writes.
        let mut disk = Disk::with_power_cuts();
        disk.write(A);
        disk.history.lose_write_back([1]);
        disk.read(B, None).unwrap();
        disk.history.forgive_losses();
        disk.flush(port).unwrap();
        disk.read(B, None).unwrap();
        let new = disk.write(A);
        disk.flush(port).unwrap();
        disk.history.lose_write_back([1]);
        disk.read(B, Some(new)).unwrap();
        // If data was lost before the acknowledgement, this can be found later.
        let mut disk = Disk::with_power_cuts();
        let lost = disk.begin(A);
        disk.history.lose_write_back([1]);
        disk.history.acknowledge(lost).unwrap();
        disk.history.forgive_losses();
        disk.flush(port).unwrap();
        disk.read(B, None).unwrap();
    }
    // No other block has lost data, and durable data must not change.
    let mut disk = Disk::with_power_cuts();
    let one = disk.write(A);
    disk.history.lose_write_back([2]);
    disk.read(A, Some(one)).unwrap();
    assert!(is_refused(disk.read(A, None)));
    // After a power failure, only the writers know about the loss.
    let mut disk = Disk::with_power_cuts();
    disk.write(A);
    disk.history.lose_write_back([1]);
    disk.history.power_cut();
    disk.read(B, None).unwrap();
    disk.flush(B).unwrap();
    assert!(is_lost(disk.flush(A)));
}

#[test]
fn zeroes_are_of_a_zeroing_that_was_not_overwritten() {
    let mut disk = Disk::with_power_cuts();
    let one = disk.write(A);
    let zero = disk.history.begin_zero(B, 0..4);
    disk.read(A, Some(one)).unwrap();
    disk.read(A, None).unwrap();
    disk.history.acknowledge(zero).unwrap();
    assert!(is_refused(disk.read(A, Some(one))));
    let two = disk.write(A);
    assert!(is_refused(disk.read(A, None)), "overwritten");
    disk.history.power_cut();
    disk.read(A, None).unwrap();
    assert!(is_refused(disk.read(A, Some(two))));
}

#[test]
fn one_of_two_swaps_from_one_version_succeeds() {
    let mut disk = Disk::new();
    let old = disk.write(A);
    let expected = disk.data[&old].clone();
    let (one, two) = (disk.begin_swap(A), disk.begin_swap(B));
    disk.history
        .acknowledge_swap(one, &expected, false)
        .unwrap();
    let again = disk.history.acknowledge_swap(two, &expected, false);
    let version = disk.history.lock().blocks[1][0].version;
    assert_eq!(again, Err(Violation::SwappedTwice { block: 1, version }));
    // Another command that expected a version which was overwritten before it was started.
    let mut disk = Disk::new();
    let old = disk.write(A);
    disk.write(B);
    let swap = disk.begin_swap(A);
    let result = disk.history.acknowledge_swap(swap, &disk.data[&old], false);
    assert!(is_refused(result));
    // Another command with a failed comparison, but its data was read.
    let mut disk = Disk::new();
    let swap = disk.begin_swap(A);
    disk.read(B, Some(swap)).unwrap();
    let refuted = disk.history.refute(swap);
    assert!(matches!(refuted, Err(Violation::Refuted { block: 1, .. })));
    let swap = disk.begin_swap(A);
    disk.history.refute(swap).unwrap();
    assert!(is_refused(disk.read(B, Some(swap))));
}

/// The comparison used a version that was overwritten by a write which completed first.
#[test]
fn a_swap_under_way_may_have_met_what_was_overwritten_since_it_began() {
    for has_repeats in [false, true] {
        let mut disk = Disk::new();
        if has_repeats {
            disk.history = disk.history.with_repeats();
        }
        let old = disk.write(A);
        let swap = disk.begin_swap(A);
        // The second write will remove the oldest version.
        disk.write(B);
        let new = disk.write(B);
        disk.history
            .acknowledge_swap(swap, &disk.data[&old], false)
            .unwrap();
        disk.read(A, Some(new)).unwrap();
        assert!(is_refused(disk.read(A, Some(old))));
    }
    // If the command was lost, we can't know the result of its comparison.
    let mut disk = Disk::new();
    let swap = disk.begin_swap(A);
    disk.history.lose(swap);
    disk.write(B);
    assert!(is_refused(disk.read(B, None)));
}

/// A generator of random numbers, which are the same in every run.
fn next(state: &mut u64, most: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state % most
}

/// A correct register must never cause an error, even if there are pending, lost or removed writes.
/// Reading data that was overwritten before the last fence must always be an error.
#[test]
fn a_register_is_never_found_fault_with_and_a_stale_one_always() {
    for seed in 1..=400u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut disk = Disk::new();
        let repeats = seed % 2 == 0;
        if repeats {
            disk.history = disk.history.with_repeats();
        }
        let mut content = None;
        // Pending writes, and whether they have been applied.
        let mut writes: Vec<(WriteId, Port, bool)> = Vec::new();
        let mut reads: Vec<(ReadId, Option<WriteId>)> = Vec::new();
        let mut old = None;
        for _ in 0..60 {
            match next(&mut state, 6) {
                0 if writes.len() < 5 => {
                    let port = Port(1 + next(&mut state, 3) as u16);
                    let id = disk.begin(port);
                    writes.push((id, port, false));
                }
                1 if !writes.is_empty() => {
                    let at = next(&mut state, writes.len() as u64) as usize;
                    if repeats || !writes[at].2 {
                        writes[at].2 = true;
                        content = Some(writes[at].0);
                    }
                }
                2 if !writes.is_empty() => {
                    let at = next(&mut state, writes.len() as u64) as usize;
                    let (id, _, is_done) = writes.remove(at);
                    match next(&mut state, 4) {
                        0 => disk.history.refuse(id),
                        1 => disk.history.lose(id),
                        _ if is_done => disk.history.acknowledge(id).unwrap(),
                        _ => {
                            content = Some(id);
                            disk.history.acknowledge(id).unwrap();
                        }
                    }
                }
                3 => {
                    // Use the data at either the start or the completion.
                    let read = disk.history.begin_read(Port(9), 1..2);
                    reads.push((read, content));
                }
                4 if !reads.is_empty() => {
                    let at = next(&mut state, reads.len() as u64) as usize;
                    let (read, seen) = reads.remove(at);
                    let seen = [seen, content][next(&mut state, 2) as usize];
                    disk.end(read, seen)
                        .unwrap_or_else(|e| panic!("{seed}: {e}"));
                }
                _ => disk
                    .read(Port(9), content)
                    .unwrap_or_else(|e| panic!("{seed}: {e}")),
            }
            if next(&mut state, 20) == 0 {
                old = content.or(old);
            }
        }
        let one = disk.write(A);
        let two = disk.write(B);
        disk.read(A, Some(two)).unwrap();
        assert!(is_refused(disk.read(A, Some(one))), "{seed}");
        if let Some(old) = old {
            let is_lost = disk.history.lock().writes.contains_key(&old);
            assert!(is_lost || is_refused(disk.read(A, Some(old))), "{seed}");
        }
    }
}

/// A block with a volatile cache, and initiators that can detect if it may have lost data.
struct Cached {
    disk: Disk,
    stable: Option<WriteId>,
    /// Versions since the last stable version.
    dirty: Vec<Option<WriteId>>,
    writes: Vec<CachedWrite>,
    /// Pending flushes, whether they were executed, and whether they should fail.
    flushes: Vec<(FlushId, Port, bool, bool)>,
    /// Ports with acknowledged writes in the cache.
    uncertain: HashMap<Port, bool>,
    /// Ports for which the next flush should fail.
    lost: HashMap<Port, bool>,
    state: u64,
}

struct CachedWrite {
    id: WriteId,
    port: Port,
    is_durable: bool,
    is_done: bool,
    /// Set if this was executed after the last power failure.
    is_done_now: bool,
}

impl Cached {
    fn draw(&mut self, most: usize) -> usize {
        next(&mut self.state, most as u64) as usize
    }

    fn content(&self) -> Option<WriteId> {
        *self.dirty.last().unwrap_or(&self.stable)
    }

    fn carry_out(&mut self, at: usize) {
        let write = &mut self.writes[at];
        (write.is_done, write.is_done_now) = (true, true);
        let (id, is_durable) = (write.id, write.is_durable);
        self.dirty.push(Some(id));
        if is_durable {
            self.stabilize_writes();
        }
    }

    fn stabilize_writes(&mut self) {
        self.stable = self.content();
        self.dirty.clear();
    }

    fn lose(&mut self, port: Port) {
        self.lost.insert(port, true);
        for flush in self.flushes.iter_mut().filter(|f| f.1 == port) {
            flush.3 = true;
        }
    }

    fn cut(&mut self) {
        let kept = self.draw(self.dirty.len() + 1);
        if kept > 0 {
            self.stable = self.dirty[kept - 1];
        }
        self.dirty.clear();
        self.disk.history.power_cut();
        for write in &mut self.writes {
            write.is_done_now = false;
        }
        let ports: Vec<_> = self.uncertain.drain().map(|(port, _)| port).collect();
        ports.into_iter().for_each(|port| self.lose(port));
    }

    fn end_write(&mut self) {
        let at = self.draw(self.writes.len());
        if !self.writes[at].is_done {
            self.carry_out(at);
        }
        let write = self.writes.remove(at);
        match (self.draw(6), write.is_durable) {
            (0, _) => self.disk.history.refuse(write.id),
            (_, true) => self.disk.history.acknowledge_durable(write.id).unwrap(),
            (_, false) => {
                self.disk.history.acknowledge(write.id).unwrap();
                match write.is_done_now {
                    true => drop(self.uncertain.insert(write.port, true)),
                    // The response was sent before the power failure.
                    false => self.lose(write.port),
                }
            }
        }
    }

    fn end_flush(&mut self) -> Result<(), Violation> {
        let at = self.draw(self.flushes.len());
        let (id, port, is_done, fails) = self.flushes.remove(at);
        if !is_done {
            self.stabilize_writes();
        }
        if self.lost.remove(&port).is_some() || fails {
            self.disk.history.fail_flush(id);
            return Ok(());
        }
        self.disk.history.end_flush(id)
    }

    fn step(&mut self) -> Result<(), Violation> {
        match self.draw(9) {
            0 | 1 if self.writes.len() < 4 => {
                let port = Port(1 + self.draw(2) as u16);
                let id = self.disk.begin(port);
                let is_durable = self.draw(4) == 0;
                self.writes.push(CachedWrite {
                    id,
                    port,
                    is_durable,
                    is_done: false,
                    is_done_now: false,
                });
            }
            2 if !self.writes.is_empty() => {
                let at = self.draw(self.writes.len());
                self.carry_out(at);
            }
            3 | 4 if !self.writes.is_empty() => self.end_write(),
            5 if self.flushes.len() < 2 => {
                let port = Port(1 + self.draw(2) as u16);
                let id = self.disk.history.begin_flush(port);
                self.flushes.push((id, port, false, false));
            }
            6 if !self.flushes.is_empty() => {
                let at = self.draw(self.flushes.len());
                if self.draw(2) == 0 {
                    self.stabilize_writes();
                    self.flushes[at].2 = true;
                } else {
                    return self.end_flush();
                }
            }
            7 if self.draw(3) == 0 => self.cut(),
            _ => {
                let seen = self.content();
                return self.disk.read(Port(9), seen);
            }
        }
        Ok(())
    }
}

#[test]
fn a_cache_that_loses_only_what_it_may_is_never_found_fault_with() {
    for seed in 1..=3000u64 {
        let mut block = Cached {
            disk: Disk::with_power_cuts(),
            stable: None,
            dirty: Vec::new(),
            writes: Vec::new(),
            flushes: Vec::new(),
            uncertain: HashMap::new(),
            lost: HashMap::new(),
            state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        };
        for step in 0..80 {
            block
                .step()
                .unwrap_or_else(|e| panic!("seed {seed}, step {step}: {e}"));
        }
        // If data was flushed but is missing later, this must be an error.
        let last = block.disk.write(A);
        block.disk.fail_flush(A);
        block.disk.flush(A).unwrap();
        block.disk.history.power_cut();
        let is_under_way = block.writes.iter().any(|w| Some(w.id) == block.stable);
        if !is_under_way && block.stable != Some(last) {
            assert!(block.disk.read(B, block.stable).is_err(), "seed {seed}");
        }
    }
}

#[test]
fn a_part_of_marked_data_names_its_port() {
    let (version, mut block) = (Version::new(7, Port::marked(3)), [0; BLOCK]);
    version.fill(5, &mut block);
    assert_eq!(Version::of(5, &block), Some(version));
    for word in block[16..].chunks(8) {
        assert_eq!(word[..6], [0xb1, 0x0c, 0x5e, 0xa7, 0x80, 0x03]);
    }
    // Each word is different, so that we can detect a part of another block.
    block.copy_within(64..128, 256);
    assert_eq!(Version::of(5, &block), None);
}
