//! Scripted client and server data, written by hand based on the protocol specification.

use proptest::prelude::*;
use riser_state::testing::{assert_all_taken, table};

use super::super::transmission::Command;
use super::*;

const SIZE: u64 = 1 << 20;

fn export() -> Export {
    Export {
        name: "disk".into(),
        description: String::new(),
        size: SIZE,
        preferred_block: 4096,
        read_only: false,
        can_trim: true,
    }
}

/// Creates a connection where the client has sent its flags.
fn in_options() -> Machine {
    let mut m = Machine::new(export());
    assert_eq!(
        m.poll_output().unwrap(),
        b"NBDMAGICIHAVEOPT\x00\x03".as_slice()
    );
    assert_eq!(m.handle(&[0, 0, 0, 3]).unwrap().consumed, 4);
    assert_eq!(m.poll_output(), None);
    m
}

/// Creates a connection in transmission phase, optionally with structured replies and status.
fn in_transmission(structured: bool) -> Machine {
    let mut m = in_options();
    if structured {
        feed(&mut m, &option(8, b""));
        feed(
            &mut m,
            &option(10, b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation"),
        );
    }
    feed(&mut m, &option(7, b"\0\0\0\0\0\0"));
    m.poll_output();
    m
}

fn option(code: u32, data: &[u8]) -> Vec<u8> {
    let mut out = b"IHAVEOPT".to_vec();
    out.extend(code.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
    out
}

fn request(flags: u16, kind: u16, offset: u64, len: u32) -> Vec<u8> {
    let mut out = vec![0x25, 0x60, 0x95, 0x13];
    out.extend(flags.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(b"COOKIE!!");
    out.extend(offset.to_be_bytes());
    out.extend(len.to_be_bytes());
    out
}

/// Feeds all bytes; payload for accepted writes is discarded.
fn feed(m: &mut Machine, mut input: &[u8]) -> Vec<Event> {
    let mut events = Vec::new();
    loop {
        let payload = (m.remaining_payload() as usize).min(input.len());
        m.handle_payload(payload as u32);
        input = &input[payload..];
        if m.is_closed() {
            return events;
        }
        let Ok(progress) = m.handle(input) else {
            return events;
        };
        input = &input[progress.consumed..];
        events.extend(progress.event);
        if progress.consumed == 0 && m.remaining_payload() == 0 {
            return events;
        }
        if input.is_empty() {
            return events;
        }
    }
}

fn states() -> [State; 7] {
    let (left, cookie, error) = (1, proto::Cookie(0), proto::Errno::Inval);
    let reply = Refusal { cookie, error };
    [
        State::ClientFlags,
        State::Options,
        State::SkipOption { left },
        State::Request,
        State::Payload { left },
        State::SkipPayload { left, reply },
        State::Closed,
    ]
}

#[test]
fn transition_table_matches_diagram() {
    let expected = "ClientFlags: Options Closed\n\
                    Options: SkipOption Request Closed\n\
                    SkipOption: Options SkipOption\n\
                    Request: Payload SkipPayload Closed\n\
                    Payload: Request\n\
                    SkipPayload: Request SkipPayload\n\
                    Closed: \n";
    assert_eq!(table(&states()), expected);
}

#[test]
fn transition_coverage_is_complete() {
    assert_all_taken(&states(), || {
        let flags = Machine::new(export()).handle(&[0xff; 4]);
        assert!(matches!(flags, Err(NbdFault::ClientFlags(_))));
        let mut m = in_options();
        let long = option(3, &vec![0; MAX_OPTION + 1]);
        feed(&mut m, &long[..20]);
        feed(&mut m, &long[20..]);
        feed(&mut m, &option(2, b""));
        assert!(m.is_closed());
        let mut m = in_transmission(false);
        feed(&mut m, &request(0, 1, 0, 8));
        m.handle_payload(8);
        // Past the end of the export, in two parts.
        feed(&mut m, &request(0, 1, SIZE, 8));
        feed(&mut m, &[0; 4]);
        feed(&mut m, &[0; 4]);
        feed(&mut m, &request(0, 2, 0, 0));
        assert!(m.is_closed());
    });
}

#[test]
fn go_reports_size_flags_and_block_sizes() {
    let mut m = in_options();
    // GO for "disk", requesting block sizes.
    feed(&mut m, &option(7, b"\0\0\0\x04disk\0\x01\0\x03"));
    let want = [
        // NBD_REP_INFO, NBD_INFO_EXPORT: 1 MiB, flags.
        b"\x00\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x07\0\0\0\x03\0\0\0\x0c".as_slice(),
        b"\0\0\0\0\0\0\0\x10\0\0\x0d\x6d",
        // NBD_REP_INFO, NBD_INFO_BLOCK_SIZE: 1, 4096, 32 MiB.
        b"\x00\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x07\0\0\0\x03\0\0\0\x0e",
        b"\0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0",
        // NBD_REP_ACK.
        b"\x00\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x07\0\0\0\x01\0\0\0\0",
    ]
    .concat();
    assert_eq!(m.poll_output().unwrap(), want);
    assert_eq!(m.state, State::Request);
}

#[test]
fn info_continues_and_export_name_ends_negotiation() {
    let mut m = in_options();
    feed(&mut m, &option(6, b"\0\0\0\0\0\0"));
    assert_eq!(m.state, State::Options);
    m.poll_output();
    feed(&mut m, &option(1, b"disk"));
    assert_eq!(m.poll_output().unwrap(), b"\0\0\0\0\0\x10\0\0\x0d\x6d");
    assert_eq!(m.state, State::Request);
}

#[test]
fn export_name_reply_is_padded_by_default() {
    let mut m = Machine::new(export());
    m.poll_output();
    feed(&mut m, &[0, 0, 0, 1]);
    feed(&mut m, &option(1, b""));
    assert_eq!(m.poll_output().unwrap().len(), 8 + 2 + 124);
}

/// Returns the reply codes for an option.
fn replies(m: &mut Machine) -> Vec<u32> {
    let out = m.poll_output().unwrap_or_default();
    let mut rest = out.as_slice();
    let mut kinds = Vec::new();
    while !rest.is_empty() {
        kinds.push(u32::from_be_bytes(rest[12..16].try_into().unwrap()));
        let len = u32::from_be_bytes(rest[16..20].try_into().unwrap()) as usize;
        rest = &rest[20 + len..];
    }
    kinds
}

#[test]
fn options_receive_expected_replies() {
    let name = |n: &[u8], rest: &[u8]| {
        let mut out = (n.len() as u32).to_be_bytes().to_vec();
        out.extend(n);
        out.extend(rest);
        out
    };
    let base = b"\0\0\0\x01\0\0\0\x0fbase:allocation";
    let cases: Vec<(u32, Vec<u8>, Vec<u32>)> = vec![
        // LIST, and LIST with data.
        (3, vec![], vec![2, 1]),
        (3, vec![1], vec![0x8000_0003]),
        // GO for an unknown export; with an invalid length; with an extra byte.
        (7, name(b"nope", b"\0\0"), vec![0x8000_0006]),
        (7, name(b"disk", b"\0\x02\0\0"), vec![0x8000_0003]),
        (7, name(b"disk", b"\0\0\0"), vec![0x8000_0003]),
        (7, b"\xff\xff\xff\xff\0\0".to_vec(), vec![0x8000_0003]),
        // STARTTLS, PEEK_EXPORT, EXTENDED_HEADERS and unknown options.
        (5, vec![], vec![0x8000_0001]),
        (4, vec![], vec![0x8000_0001]),
        (11, vec![], vec![0x8000_0001]),
        (0xdead_beef, vec![0; 100], vec![0x8000_0001]),
        // Metadata context without structured replies.
        (10, name(b"disk", base), vec![0x8000_0003]),
        // Structured replies, with data and without.
        (8, vec![0], vec![0x8000_0003]),
        (8, vec![], vec![1]),
        // Metadata context: all, by namespace, by name, unknown, different export, truncated.
        (9, name(b"disk", b"\0\0\0\0"), vec![4, 1]),
        (9, name(b"", b"\0\0\0\x01\0\0\0\x05base:"), vec![4, 1]),
        (10, name(b"disk", base), vec![4, 1]),
        (10, name(b"disk", b"\0\0\0\x01\0\0\0\x05base:"), vec![1]),
        (10, name(b"disk", b"\0\0\0\x01\0\0\0\x06qemu:x"), vec![1]),
        (10, name(b"nope", base), vec![0x8000_0006]),
        (
            10,
            name(b"disk", b"\0\0\0\x02\0\0\0\x05base:"),
            vec![0x8000_0003],
        ),
        (10, name(b"disk", b"\xff\xff\xff\xff"), vec![0x8000_0003]),
        // Exceeds the max supported length.
        (7, vec![0; MAX_OPTION + 1], vec![0x8000_0009]),
        // The connection can still be used.
        (6, name(b"disk", b"\0\0"), vec![3, 1]),
        (2, vec![], vec![1]),
    ];
    let mut m = in_options();
    for (code, data, want) in cases {
        let events = feed(&mut m, &option(code, &data));
        assert_eq!(replies(&mut m), want, "option {code} with {data:?}");
        assert_eq!(events.len(), usize::from(code == 2));
    }
    assert!(m.is_closed());
}

#[test]
fn protocol_errors_close_connection() {
    let fault = |m: &mut Machine, bytes: &[u8]| {
        let error = m.handle(bytes).unwrap_err();
        assert!(m.is_closed());
        assert_eq!(m.handle(b""), Err(NbdFault::Closed));
        error
    };
    let mut m = Machine::new(export());
    assert_eq!(fault(&mut m, &[0, 0, 0, 7]), NbdFault::ClientFlags(7));
    assert_eq!(
        fault(&mut in_options(), b"GET / HTTP/1.1\r\n"),
        NbdFault::OptionMagic(0x4745_5420_2f20_4854)
    );
    assert_eq!(
        fault(&mut in_options(), &option(1, b"nope")),
        NbdFault::UnknownExport
    );
    let huge = b"IHAVEOPT\0\0\0\x07\xff\xff\xff\xff";
    assert_eq!(
        fault(&mut in_options(), huge),
        NbdFault::OptionLength {
            option: 7,
            len: u32::MAX
        }
    );
    assert_eq!(
        fault(&mut in_transmission(false), &[0; 28]),
        NbdFault::RequestMagic(0)
    );
}

#[test]
fn requests_are_decoded() {
    let mut m = in_transmission(true);
    let mut one = |bytes: &[u8]| match feed(&mut m, bytes).as_slice() {
        [Event::Request(r)] => (r.command, r.offset, r.len),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        one(&request(4, 0, 512, 1024)),
        (
            Command::Read {
                dont_fragment: true
            },
            512,
            1024
        )
    );
    assert_eq!(
        one(&[request(1, 1, 8, 3), vec![1, 2, 3]].concat()),
        (Command::Write { fua: true }, 8, 3)
    );
    assert_eq!(one(&request(0, 3, 0, 0)), (Command::Flush, 0, 0));
    assert_eq!(
        one(&request(0, 4, 0, 4096)),
        (Command::Trim { fua: false }, 0, 4096)
    );
    assert_eq!(one(&request(0, 5, 0, 1)), (Command::Cache, 0, 1));
    assert_eq!(
        one(&request(0x13, 6, 1, 1)),
        (
            Command::WriteZeroes {
                fua: true,
                no_hole: true,
                fast: true
            },
            1,
            1
        )
    );
    assert_eq!(
        one(&request(8, 7, 0, 1 << 20)),
        (Command::BlockStatus { one: true }, 0, 1 << 20)
    );
    assert_eq!(feed(&mut m, &request(0, 2, 0, 0)), [Event::Disconnect]);
    assert!(m.is_closed());
}

#[test]
fn invalid_requests_fail_without_closing() {
    let size = SIZE;
    // flags, command, offset, length, error
    let cases: &[(u16, u16, u64, u32, u32)] = &[
        (0, 9, 0, 0, 22),
        (0, 0, size - 1, 2, 22),
        (0, 0, u64::MAX, 2, 22),
        (0, 0, 0, 0, 22),
        (0, 0, 0, (32 << 20) + 1, 22),
        (2, 0, 0, 512, 22),
        (4, 1, 0, 16, 22),
        (0, 1, size, 16, 28),
        (0, 1, 0, (32 << 20) + 1, 22),
        (0, 3, 512, 0, 22),
        (0, 4, size, 1, 22),
        (0, 6, size, 1, 28),
        (0x20, 6, 0, 1, 22),
    ];
    for structured in [false, true] {
        for &(flags, kind, offset, len, error) in cases {
            let mut m = in_transmission(structured);
            let mut bytes = request(flags, kind, offset, len);
            if kind == 1 {
                bytes.extend(vec![0x25; len as usize]);
            }
            assert_eq!(feed(&mut m, &bytes), []);
            let mut want = Vec::new();
            if structured && kind == 0 {
                // Error chunk, done flag set, no message.
                want.extend(b"\x66\x8e\x33\xef\0\x01\x80\x01COOKIE!!\0\0\0\x06");
                want.extend(error.to_be_bytes());
                want.extend([0, 0]);
            } else {
                want.extend(b"\x67\x44\x66\x98");
                want.extend(error.to_be_bytes());
                want.extend(b"COOKIE!!");
            }
            assert_eq!(m.poll_output().unwrap(), want, "command {kind}");
            assert_eq!(feed(&mut m, &request(0, 0, 0, 1)).len(), 1);
        }
    }
}

#[test]
fn status_and_df_need_their_negotiation() {
    let mut m = in_transmission(false);
    assert_eq!(feed(&mut m, &request(0, 7, 0, 512)), []);
    assert_eq!(feed(&mut m, &request(4, 0, 0, 512)), []);
    assert_eq!(m.poll_output().unwrap().len(), 32);
}

#[test]
fn read_only_export_rejects_changes() {
    let mut m = Machine::new(Export {
        read_only: true,
        ..export()
    });
    m.poll_output();
    feed(&mut m, &[0, 0, 0, 3]);
    feed(&mut m, &option(1, b""));
    // Flags: has flags, read only, flush, multi-conn, cache.
    assert_eq!(m.poll_output().unwrap()[8..], [0x05, 0x07]);
    for kind in [1, 4, 6] {
        let mut bytes = request(0, kind, 0, 4);
        if kind == 1 {
            bytes.extend([0; 4]);
        }
        assert_eq!(feed(&mut m, &bytes), []);
        assert_eq!(
            m.poll_output().unwrap(),
            b"\x67\x44\x66\x98\0\0\0\x01COOKIE!!"
        );
    }
}

#[test]
fn replies_match_specified_bytes() {
    let cookie = proto::Cookie(0x434f_4f4b_4945_2121);
    assert_eq!(
        proto::data_chunk(cookie, 0x1000, 512, true),
        b"\x66\x8e\x33\xef\0\x01\0\x01COOKIE!!\0\0\x02\x08\0\0\0\0\0\0\x10\0"
    );
    assert_eq!(
        proto::done_chunk(cookie),
        b"\x66\x8e\x33\xef\0\x01\0\0COOKIE!!\0\0\0\0"
    );
    assert_eq!(
        proto::error_chunk(cookie, proto::Errno::Io, Some(9), false),
        b"\x66\x8e\x33\xef\0\0\x80\x02COOKIE!!\0\0\0\x0e\0\0\0\x05\0\0\0\0\0\0\0\0\0\x09"
    );
    assert_eq!(
        proto::status_chunk(cookie, &[(65536, 3), (512, 0)]),
        b"\x66\x8e\x33\xef\0\x01\0\x05COOKIE!!\0\0\0\x14\0\0\0\x01\
          \0\x01\0\0\0\0\0\x03\0\0\x02\0\0\0\0\0"
    );
}

/// Mostly valid streams, to get good coverage.
fn stream() -> impl Strategy<Value = Vec<u8>> {
    let data = proptest::collection::vec(any::<u8>(), 0..64);
    let opt = (0..12u32, data.clone()).prop_map(|(code, data)| option(code, &data));
    let go = Just(option(7, b"\0\0\0\0\0\0"));
    let structured = Just(option(8, b""));
    let req = (0..32u16, 0..9u16, 0..SIZE + 10, 0..200u32, any::<bool>()).prop_map(
        |(flags, kind, offset, len, fill)| {
            let mut out = request(flags, kind, offset, len);
            if kind == 1 && fill {
                out.extend(vec![7; len as usize]);
            }
            out
        },
    );
    let part = prop_oneof![2 => opt, 1 => go, 1 => structured, 6 => req, 1 => data];
    proptest::collection::vec(part, 0..20)
        .prop_map(|parts| [vec![vec![0, 0, 0, 3]], parts].concat().concat())
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in stream()) {
        let mut m = Machine::new(export());
        feed(&mut m, &bytes);
    }

    #[test]
    fn parsing_is_independent_of_fragmentation(
        bytes in stream(),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let mut whole = Machine::new(export());
        let want = feed(&mut whole, &bytes);

        let mut cuts: Vec<_> = cuts.iter().map(|c| c.index(bytes.len())).collect();
        cuts.push(bytes.len());
        cuts.sort_unstable();
        let mut m = Machine::new(export());
        let mut got = Vec::new();
        let mut pending: Vec<u8> = Vec::new();
        let mut at = 0;
        for cut in cuts {
            pending.extend(&bytes[at..cut]);
            at = cut;
            // Unconsumed input is passed again, just like in a driver.
            loop {
                let payload = (m.remaining_payload() as usize).min(pending.len());
                m.handle_payload(payload as u32);
                pending.drain(..payload);
                let Ok(progress) = m.handle(&pending) else { break };
                pending.drain(..progress.consumed);
                got.extend(progress.event);
                if progress.consumed == 0 && m.remaining_payload() == 0 || pending.is_empty() {
                    break;
                }
            }
        }
        prop_assert_eq!(got, want);
        prop_assert_eq!(m.output, whole.output);
        prop_assert_eq!(m.state, whole.state);
    }
}
