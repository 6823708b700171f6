use super::*;

const A: Port = Port(1);
const B: Port = Port(2);

/// Writes of one block, and reads of it that see what a write left there.
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
    // A read that begins while a write is under way and another after its end.
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
fn a_lost_write_may_come_late_until_its_port_is_answered() {
    let mut disk = Disk::new();
    let one = disk.begin(A);
    disk.history.lose(one);
    let two = disk.write(B);
    disk.read(B, Some(two)).unwrap();
    // Nothing has shown that it is over.
    disk.read(B, Some(one)).unwrap();
    assert!(is_refused(disk.read(B, Some(two))), "and back");

    let mut disk = Disk::new();
    let one = disk.begin(A);
    disk.history.lose(one);
    let two = disk.write(B);
    disk.read(A, Some(two)).unwrap();
    assert_eq!(disk.history.lost(), 0, "a command of its port was answered");
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

/// A command that was sent before the loss says nothing of what was lost.
#[test]
fn an_answer_to_an_earlier_command_is_no_fence() {
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

/// A read that began before a write may see what that overwrites, also if it is the read's end that
/// ends a lost write.
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

/// A write that is repeated comes back until it is acknowledged, and not within a time in which
/// another version was there throughout.
#[test]
fn a_repeated_write_may_come_back_until_it_ends() {
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
    // A mixture of whole blocks is legal where the writes are concurrent.
    let mixed = [&one[..BLOCK], &two[BLOCK..]].concat();
    see(&mixed).unwrap();
    let mut torn = mixed.clone();
    torn[256..BLOCK].copy_from_slice(&two[256..BLOCK]);
    assert_eq!(
        see(&torn),
        Err(Violation::Torn {
            block: 1,
            byte: 256
        })
    );
    let mut spoilt = mixed.clone();
    spoilt[2 * BLOCK - 1] ^= 1;
    assert!(matches!(
        see(&spoilt),
        Err(Violation::Torn {
            block: 2,
            byte: 511
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

/// A generator of numbers that are the same in every run.
fn next(state: &mut u64, most: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state % most
}

/// The behaviour of a register is never a violation, also with writes under way, lost or forgotten;
/// reading what was overwritten before the last fence always is one.
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
        // Writes under way, and whether they have taken effect.
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
                    // Samples the content at its begin or at its end.
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
