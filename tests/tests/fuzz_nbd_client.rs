//! Fuzz targets for the NBD client, using the input as data received from a server.

use std::io::{self, Cursor, Read, Write};

use riser_exports::nbd::client::{
    Event, HandshakeError, Negotiated, ReplyFault, Request, RequestOutcome, Requests, negotiate,
};
use riser_tests::seeds;

/// ID of the selected context, which is the same in the seeds.
const CONTEXT: u32 = 1;

const READ: u32 = 64;
const STATUS: u32 = 1 << 20;
const BLOCK: u32 = 512;

/// Requests in flight. The token of each request is its index.
const REQUESTS: [Request; 4] = [
    Request::Read {
        offset: 4096,
        len: READ,
    },
    Request::Write {
        offset: 0,
        len: 512,
        fua: false,
    },
    Request::Flush,
    Request::BlockStatus {
        offset: 0,
        len: STATUS,
    },
];

/// Result of processing replies from a server.
#[derive(Debug, PartialEq)]
struct Outcome {
    /// Completions, with the index of the request.
    ends: Vec<(usize, RequestOutcome)>,
    /// Data received for the read.
    data: [Option<u8>; READ as usize],
    fault: Option<ReplyFault>,
}

impl Outcome {
    /// Stores a part of the read, which must not be received twice.
    fn place(&mut self, at: usize, bytes: impl Iterator<Item = u8>) {
        for (place, byte) in self.data[at..].iter_mut().zip(bytes) {
            assert_eq!(place.replace(byte), None, "{at}");
        }
    }

    fn end(&mut self, request: usize, end: RequestOutcome) {
        assert!(self.ends.iter().all(|(known, _)| *known != request));
        match (REQUESTS[request], &end.result) {
            (Request::Read { .. }, Ok(())) => {
                assert!(self.data.iter().all(Option::is_some), "data are missing");
            }
            (Request::BlockStatus { len, .. }, Ok(())) => {
                let total: u64 = end.extents.iter().map(|extent| extent.len).sum();
                assert!((1..=u64::from(len)).contains(&total), "{end:?}");
                let blocks = |len: u64| len > 0 && len.is_multiple_of(BLOCK.into());
                assert!(end.extents.iter().all(|extent| blocks(extent.len)));
            }
            _ => assert!(end.extents.is_empty()),
        }
        self.ends.push((request, end));
    }
}

/// Sends a stream to the client, split into pieces of this length. The first byte selects whether
/// structured replies are used.
fn run(input: &[u8], piece: usize) -> Outcome {
    let structured = input.first().is_some_and(|flags| flags & 1 != 0);
    let stream = input.get(1..).unwrap_or_default();
    let mut requests = Requests::new(structured, structured.then_some(CONTEXT), BLOCK);
    for (place, request) in REQUESTS.into_iter().enumerate() {
        requests.submit(request, place);
    }
    let mut outcome = Outcome {
        ends: Vec::new(),
        data: [None; READ as usize],
        fault: None,
    };
    let (mut at, mut end) = (0, 0);
    loop {
        let mut moved = 0;
        if let Some((token, place, left)) = requests.payload() {
            assert_eq!(*token, 0, "only the read has data");
            assert!(place + left <= READ as usize);
            moved = left.min(end - at);
            let bytes = stream[at..at + moved].iter().copied();
            outcome.place(place, bytes);
            at += moved;
            requests.handle_payload(moved);
        }
        let progress = match requests.handle(&stream[at..end]) {
            Ok(progress) => progress,
            Err(fault) => {
                assert_eq!(requests.handle(&[]).unwrap_err(), ReplyFault::Closed);
                outcome.fault = Some(fault);
                break;
            }
        };
        assert!(progress.consumed <= end - at);
        at += progress.consumed;
        let is_idle = progress.consumed == 0 && progress.event.is_none() && moved == 0;
        match progress.event {
            Some(Event::Done(request, end)) => outcome.end(request, end),
            Some(Event::Hole(key, range)) => {
                assert_eq!(*requests.token(key), 0, "only the read has holes");
                outcome.place(range.start, std::iter::repeat_n(0, range.len()));
            }
            None => {}
        }
        if is_idle {
            if end == stream.len() {
                break;
            }
            // Any further data is ignored.
            end = (end + piece).min(stream.len());
        }
    }
    assert_eq!(
        requests.in_flight() + outcome.ends.len(),
        REQUESTS.len(),
        "each is in flight or has ended"
    );
    outcome
}

/// For any replies from a server, a request must complete at most once, a successful read must have
/// all of its data, and the result must not depend on how the stream was split.
fn check_replies(input: &[u8]) {
    let whole = run(input, input.len().max(1));
    assert_eq!(run(input, 5), whole);
}

#[test]
fn nbd_replies() {
    bolero::check!().for_each(|bytes: &[u8]| check_replies(bytes));
}

#[test]
fn changed_nbd_replies() {
    let seeds = seeds::load("nbd_replies");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_replies(&seeds::change(&seeds, changes)));
}

#[test]
fn seeds_of_replies_end_requests() {
    for (name, input) in seeds::load("nbd_replies") {
        let outcome = run(&input, 5);
        assert_eq!(outcome.fault, None, "{name}");
        assert!(!outcome.ends.is_empty(), "{name}");
    }
}

/// A server that sends the same data to every client and then closes the connection.
struct Script<'a> {
    input: Cursor<&'a [u8]>,
    sent: usize,
}

impl Read for Script<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.input.read(out)
    }
}

impl Write for Script<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.sent += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn negotiate_with(bytes: &[u8]) -> Result<Negotiated, HandshakeError> {
    let mut script = Script {
        input: Cursor::new(bytes),
        sent: 0,
    };
    let result = negotiate(&mut script, "disk");
    // Client flags, and one option of each type. This must not depend on the replies.
    assert!(script.sent <= 256, "{} bytes", script.sent);
    result
}

/// For any data from a server, the negotiated values must be valid.
fn check_negotiation(bytes: &[u8]) {
    let Ok(negotiated) = negotiate_with(bytes) else {
        return;
    };
    let Negotiated {
        min_block,
        preferred_block,
        max_payload,
        structured,
        allocation_context,
        ..
    } = negotiated;
    assert!(min_block.is_power_of_two() && min_block <= 65536);
    assert!(preferred_block.is_none_or(|size| size.is_power_of_two() && size >= min_block));
    assert!(max_payload >= min_block);
    assert!(structured || allocation_context.is_none());
}

#[test]
fn nbd_negotiation() {
    bolero::check!().for_each(|bytes: &[u8]| check_negotiation(bytes));
}

#[test]
fn changed_nbd_negotiation() {
    let seeds = seeds::load("nbd_negotiation");
    bolero::check!()
        .with_type::<seeds::Changes>()
        .for_each(|changes| check_negotiation(&seeds::change(&seeds, changes)));
}

#[test]
fn seeds_of_negotiations_succeed() {
    for (name, bytes) in seeds::load("nbd_negotiation") {
        let negotiated = negotiate_with(&bytes);
        assert!(negotiated.is_ok_and(|n| n.size == 1 << 20), "{name}");
    }
}
