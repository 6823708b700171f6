//! Fuzz targets for a connection of the NBD server, using the input as data received from a client.

use riser_exports::nbd::proto::{self, MAX_REQUEST, NBD_MAGIC, OPTION_MAGIC, REQUEST_MAGIC};
use riser_exports::nbd::{Command, Event, Export, Machine, NbdRequest};
use riser_tests::seeds;

const SIZE: u64 = 1 << 20;

/// A message sent by a client.
#[derive(Debug, Clone, bolero::TypeGenerator)]
enum Piece {
    /// An option that is valid or almost valid. Its data contains a name and then these bytes.
    Option(u8, Name, Vec<u8>),
    /// A request with flags, type, offset and length.
    Request(u8, u8, u32, u16, Place),
    /// Arbitrary bytes.
    Bytes(Vec<u8>),
}

#[derive(Debug, Clone, Copy, bolero::TypeGenerator)]
enum Name {
    None,
    Ours,
    Empty,
    Other,
}

/// Location of a request.
#[derive(Debug, Clone, Copy, bolero::TypeGenerator)]
enum Place {
    Anywhere,
    AtTheEnd,
    Beyond,
}

fn put(pieces: &[Piece], flags: u8) -> Vec<u8> {
    let mut out = u32::from(flags & 3).to_be_bytes().to_vec();
    for piece in pieces {
        match piece {
            Piece::Option(code, name, rest) => {
                let mut data = match name {
                    Name::None => Vec::new(),
                    Name::Ours => b"\0\0\0\x04disk".to_vec(),
                    Name::Empty => vec![0; 4],
                    Name::Other => b"\0\0\0\x05other".to_vec(),
                };
                data.extend(rest);
                out.extend(OPTION_MAGIC.to_be_bytes());
                out.extend(u32::from(code % 12).to_be_bytes());
                out.extend((data.len() as u32).to_be_bytes());
                out.extend(data);
            }
            Piece::Request(flags, kind, offset, len, place) => {
                let (offset, len) = (u64::from(*offset), u32::from(*len));
                let (offset, len) = match place {
                    Place::Anywhere => (offset % SIZE, len),
                    Place::AtTheEnd => (SIZE - 8192 + offset % 9000, len % 9000),
                    Place::Beyond => (offset << 44, len << 16),
                };
                out.extend(REQUEST_MAGIC.to_be_bytes());
                // Most requests have no flags.
                let flags = if *flags < 64 { flags % 32 } else { 0 };
                out.extend(u16::from(flags).to_be_bytes());
                out.extend(u16::from(kind % 9).to_be_bytes());
                out.extend(b"COOKIE!!");
                out.extend(offset.to_be_bytes());
                out.extend(len.to_be_bytes());
                // Payload of a write.
                if kind % 9 == 1 && len <= 1 << 16 {
                    out.extend(vec![7; len as usize]);
                }
            }
            Piece::Bytes(bytes) => out.extend(bytes),
        }
    }
    out
}

/// Sends a stream to the state machine, split into pieces of this length. Returns its responses and
/// events.
fn run(stream: &[u8], piece: usize, read_only: bool) -> (Vec<u8>, Vec<Event>) {
    let mut machine = Machine::new(Export {
        name: "disk".into(),
        description: String::new(),
        size: SIZE,
        preferred_block: 4096,
        read_only,
        can_trim: true,
    });
    let (mut output, mut events) = (Vec::new(), Vec::new());
    let (mut at, mut end) = (0, 0);
    loop {
        output.extend(machine.poll_output().unwrap_or_default());
        let payload = (machine.remaining_payload() as usize).min(end - at);
        machine.handle_payload(payload as u32);
        at += payload;
        if machine.is_closed() {
            break;
        }
        let Ok(progress) = machine.handle(&stream[at..end]) else {
            assert!(machine.is_closed());
            break;
        };
        assert!(progress.consumed <= end - at);
        at += progress.consumed;
        if let Some(Event::Request(request)) = progress.event {
            check(&machine, &request, read_only);
        }
        events.extend(progress.event);
        if progress.consumed == 0 && payload == 0 {
            if end == stream.len() {
                break;
            }
            // Any further data is ignored.
            end = (end + piece).min(stream.len());
        }
    }
    output.extend(machine.poll_output().unwrap_or_default());
    (output, events)
}

/// Checks that a request passed to a disk is in range and allowed.
fn check(machine: &Machine, request: &NbdRequest, read_only: bool) {
    let end = request.offset.checked_add(request.len.into());
    assert!(end.is_some_and(|end| end <= SIZE), "{request:?}");
    let moves = matches!(
        request.command,
        Command::Read { .. } | Command::Write { .. }
    );
    assert!(!moves || request.len <= MAX_REQUEST, "{request:?}");
    let changes = matches!(
        request.command,
        Command::Write { .. } | Command::Trim { .. } | Command::WriteZeroes { .. }
    );
    assert!(!(changes && read_only), "{request:?}");
    assert_eq!(machine.remaining_payload(), request.payload().unwrap_or(0));
}

/// For any data from a client, requests passed to the disk must be in range, and the result must
/// not depend on how the stream was split.
fn check_stream(stream: &[u8], piece: usize, read_only: bool) {
    let whole = run(stream, stream.len(), read_only);
    let cut = run(stream, piece, read_only);
    assert_eq!(whole, cut);
    let (output, _) = whole;
    assert_eq!(output[..8], NBD_MAGIC.to_be_bytes());
    // The output size must be limited to a small multiple of the input size.
    assert!(output.len() <= 64 + 16 * stream.len());
}

#[test]
fn nbd_stream() {
    bolero::check!().for_each(|bytes: &[u8]| check_stream(bytes, 7, false));
}

#[test]
fn changed_nbd_stream() {
    let seeds = seeds::load("nbd_stream");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_stream(&seeds::change(&seeds, changes), 7, false));
}

#[test]
fn nbd_session() {
    bolero::check!()
        .with_type::<(u8, bool, Vec<Piece>, u8, bool)>()
        .for_each(|(flags, goes, rest, piece, read_only)| {
            let mut pieces = rest.clone();
            if *goes {
                pieces.insert(0, go());
            }
            check_stream(&put(&pieces, *flags), usize::from(*piece) + 1, *read_only);
        });
}

/// Option to start the transmission phase.
fn go() -> Piece {
    Piece::Option(proto::opt::GO as u8, Name::Ours, vec![0, 0])
}

/// Checks that the messages in [`nbd_session`] can reach the transmission phase and that requests
/// are accepted.
#[test]
fn sessions_reach_disk() {
    let write = Piece::Request(0, 1, 4096, 512, Place::Anywhere);
    let read = Piece::Request(0, 0, 4096, 512, Place::Anywhere);
    let (output, events) = run(&put(&[go(), write, read], 3), 5, false);
    assert_eq!(events.len(), 2, "{output:02x?} {events:?}");
    for (name, stream) in seeds::load("nbd_stream") {
        // Either a request, or a disconnect that was requested by the client.
        assert_eq!(run(&stream, 5, false).1.len(), 1, "{name}");
    }
}
