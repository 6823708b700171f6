use std::io::{self, Cursor, Read, Write};

use proptest::prelude::*;
use riser_block::{BlockError, Extent, ExtentKind};

use super::*;
use crate::nbd::proto::{self, Cookie, Errno, chunk, flag, info, opt, rep};
use crate::nbd::{Export, Machine};

/// Our own server, without a socket.
struct Own(Machine, Vec<u8>, Vec<u8>);

impl Own {
    fn new(change: impl FnOnce(&mut Export)) -> Self {
        let mut export = Export {
            name: "disk".into(),
            description: "for tests".into(),
            size: 1 << 20,
            preferred_block: 4096,
            read_only: false,
            can_trim: true,
        };
        change(&mut export);
        Self(Machine::new(export), Vec::new(), Vec::new())
    }
}

impl Read for Own {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while let Some(more) = self.0.poll_output() {
            self.2.extend(more);
        }
        let n = out.len().min(self.2.len());
        out[..n].copy_from_slice(&self.2[..n]);
        self.2.drain(..n);
        Ok(n)
    }
}

impl Write for Own {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.extend(bytes);
        while let Ok(progress) = self.0.handle(&self.1) {
            if progress.consumed == 0 {
                break;
            }
            self.1.drain(..progress.consumed);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Server which sends fixed bytes to all clients and then closes the connection.
struct Script(Cursor<Vec<u8>>, Vec<u8>);

impl Read for Script {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out)
    }
}

impl Write for Script {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn greeting(flags: u16) -> Vec<u8> {
    let mut out = proto::NBD_MAGIC.to_be_bytes().to_vec();
    out.extend(proto::OPTION_MAGIC.to_be_bytes());
    out.extend(flags.to_be_bytes());
    out
}

fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut out = proto::OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    for number in [option, kind, data.len() as u32] {
        out.extend(number.to_be_bytes());
    }
    out.extend(data);
    out
}

fn block_sizes(sizes: [u32; 3]) -> Vec<u8> {
    let mut data = info::BLOCK_SIZE.to_be_bytes().to_vec();
    sizes
        .iter()
        .for_each(|size| data.extend(size.to_be_bytes()));
    reply(opt::GO, rep::INFO, &data)
}

fn export_info(size: u64, flags: u16) -> Vec<u8> {
    let mut data = info::EXPORT.to_be_bytes().to_vec();
    data.extend(size.to_be_bytes());
    data.extend(flags.to_be_bytes());
    reply(opt::GO, rep::INFO, &data)
}

/// Negotiates with a server which sends a valid greeting, rejects structured replies, and then
/// sends `rest`.
fn scripted(rest: &[Vec<u8>]) -> Result<Negotiated, HandshakeError> {
    let mut bytes = greeting(3);
    bytes.extend(reply(opt::STRUCTURED_REPLY, rep::ERR_UNSUP, &[]));
    bytes.extend(rest.concat());
    negotiate(&mut Script(Cursor::new(bytes), Vec::new()), "disk")
}

#[test]
fn client_understands_own_server() {
    let mut server = Own::new(|_| {});
    let negotiated = negotiate(&mut server, "disk").unwrap();
    assert!(negotiated.structured && negotiated.allocation_context.is_some());
    assert_eq!((negotiated.size, negotiated.min_block), (1 << 20, 1));
    assert_eq!(negotiated.preferred_block, Some(4096));
    assert_eq!(negotiated.max_payload, 32 << 20);
    let wanted = flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_TRIM | flag::SEND_WRITE_ZEROES;
    assert_eq!(negotiated.flags & wanted, wanted);
    let read_only = negotiate(&mut Own::new(|e| e.read_only = true), "").unwrap();
    assert_ne!(read_only.flags & flag::READ_ONLY, 0);
    let unknown = negotiate(&mut Own::new(|_| {}), "other").unwrap_err();
    let is_unknown =
        matches!(&unknown, HandshakeError::UnknownExport { export, .. } if export == "other");
    assert!(is_unknown, "{unknown}");
}

#[test]
fn missing_go_falls_back_to_export_name() {
    let export = |pad: usize| {
        let mut data = (5u64 << 20).to_be_bytes().to_vec();
        data.extend((flag::HAS_FLAGS | flag::READ_ONLY).to_be_bytes());
        data.resize(data.len() + pad, 0);
        data
    };
    let refused = reply(opt::GO, rep::ERR_UNSUP, &[]);
    let negotiated = scripted(&[refused.clone(), export(0)]).unwrap();
    assert_eq!(negotiated.size, 5 << 20);
    assert_eq!(negotiated.flags, flag::HAS_FLAGS | flag::READ_ONLY);
    assert!(!negotiated.structured);
    // The server closes the connection if the export doesn't exist.
    let error = scripted(std::slice::from_ref(&refused)).unwrap_err();
    assert!(
        matches!(error, HandshakeError::UnknownExport { .. }),
        "{error}"
    );
    // Without this flag, the reply is padded.
    let mut bytes = greeting(1);
    bytes.extend(reply(opt::STRUCTURED_REPLY, rep::ERR_UNSUP, &[]));
    bytes.extend(refused);
    bytes.extend(export(124));
    let mut script = Script(Cursor::new(bytes), Vec::new());
    assert_eq!(negotiate(&mut script, "disk").unwrap().size, 5 << 20);
    assert_eq!(script.0.position() as usize, script.0.get_ref().len());
}

#[test]
fn malformed_negotiation_fails_with_reason() {
    let go = |kind, data: &[u8]| reply(opt::GO, kind, data);
    let mut long = go(rep::INFO, &[]);
    long[16..].copy_from_slice(&u32::MAX.to_be_bytes());
    let mut no_magic = go(rep::ACK, &[]);
    no_magic[0] ^= 1;
    let flood: Vec<u8> = export_info(1 << 20, 1).repeat(100);
    for (rest, words) in [
        (vec![go(rep::ACK, &[])], "did not report the size"),
        (vec![long], "malformed"),
        (vec![no_magic], "invalid magic"),
        (
            vec![reply(opt::LIST, rep::ACK, &[])],
            "reply to option 3 instead of option 7",
        ),
        (vec![flood], "more than 64 replies"),
        (vec![go(rep::INFO, &[0])], "malformed"),
        (vec![go(rep::INFO, &[0; 11])], "malformed"),
        (vec![go(rep::INFO, &[0; 13])], "malformed"),
        (vec![block_sizes([0, 4096, 4096])], "invalid block sizes"),
        (vec![block_sizes([3, 4096, 4096])], "invalid block sizes"),
        (vec![block_sizes([512, 256, 4096])], "invalid block sizes"),
        (vec![block_sizes([4096, 4096, 512])], "invalid block sizes"),
        (vec![block_sizes([512, 4096, 1000])], "invalid block sizes"),
        (
            vec![go(rep::ERR_TLS_REQD, b"use\x1b TLS")],
            "not supported: use TLS",
        ),
        (
            vec![go(rep::ERR_UNKNOWN, b"nothing here")],
            "no export `disk`: nothing here",
        ),
        (
            vec![go(rep::ERR_POLICY, b"")],
            "rejected option 7 with error 2",
        ),
        (vec![], "connection failed"),
    ] {
        let error = scripted(&rest).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
    for (greeting, words) in [
        (b"SSH-2.0-OpenSSH_9\r\n".to_vec(), "not an NBD server"),
        (
            [
                &proto::NBD_MAGIC.to_be_bytes()[..],
                &proto::OLDSTYLE_MAGIC.to_be_bytes(),
            ]
            .concat(),
            "fixed newstyle",
        ),
        (greeting(0), "fixed newstyle"),
        (greeting(3)[..10].to_vec(), "connection failed"),
    ] {
        let mut script = Script(Cursor::new(greeting), Vec::new());
        let error = negotiate(&mut script, "disk").unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
}

const CONTEXT: u32 = 9;

fn requests(structured: bool) -> Requests<char> {
    Requests::new(structured, structured.then_some(CONTEXT), 512)
}

fn cookie(header: &[u8]) -> Cookie {
    Cookie(u64::from_be_bytes(header[8..16].try_into().unwrap()))
}

/// Completed requests in order, and read data with offsets.
type Fed = (Vec<(char, RequestOutcome)>, Vec<(char, usize, Vec<u8>)>);

/// Feeds all bytes.
fn feed(requests: &mut Requests<char>, mut bytes: &[u8]) -> Result<Fed, ReplyFault> {
    let (mut ends, mut data) = (Vec::new(), Vec::new());
    loop {
        if let Some((token, at, left)) = requests.payload() {
            let n = left.min(bytes.len());
            if n == 0 {
                return Ok((ends, data));
            }
            data.push((*token, at, bytes[..n].to_vec()));
            bytes = &bytes[n..];
            requests.handle_payload(n);
            continue;
        }
        let progress = requests.handle(bytes)?;
        bytes = &bytes[progress.consumed..];
        match progress.event {
            Some(Event::Done(token, end)) => ends.push((token, end)),
            Some(Event::Hole(key, range)) => {
                data.push((*requests.token(key), range.start, vec![0; range.len()]));
            }
            None if progress.consumed == 0 => {
                assert!(bytes.is_empty(), "{} bytes are left", bytes.len());
                return Ok((ends, data));
            }
            None => {}
        }
    }
}

fn hole(cookie: Cookie, offset: u64, len: u32, flags: u16) -> Vec<u8> {
    let mut out = proto::chunk_header(cookie, chunk::OFFSET_HOLE, flags, 12).to_vec();
    out.extend(offset.to_be_bytes());
    out.extend(len.to_be_bytes());
    out
}

fn data(cookie: Cookie, offset: u64, bytes: &[u8], done: bool) -> Vec<u8> {
    let mut out = proto::data_chunk(cookie, offset, bytes.len() as u32, done);
    out.extend(bytes);
    out
}

fn read(len: u32) -> Request {
    Request::Read { offset: 4096, len }
}

const FINE: RequestOutcome = RequestOutcome {
    result: Ok(()),
    extents: Vec::new(),
};

#[test]
fn replies_find_their_requests_in_any_order() {
    let mut r = requests(false);
    let a = cookie(&r.submit(read(4), 'a'));
    let b = cookie(&r.submit(Request::Flush, 'b'));
    let c = cookie(&r.submit(read(2), 'c'));
    let mut bytes = proto::simple_reply(c, None).to_vec();
    bytes.extend([1, 2]);
    bytes.extend(proto::simple_reply(b, Some(Errno::NoSpc)));
    bytes.extend(proto::simple_reply(a, None));
    bytes.extend([3, 4, 5, 6]);
    let (ends, data) = feed(&mut r, &bytes).unwrap();
    let failed = RequestOutcome {
        result: Err(BlockError::NoSpace),
        ..FINE
    };
    assert_eq!(ends, [('c', FINE), ('b', failed), ('a', FINE)]);
    assert_eq!(data, [('c', 0, vec![1, 2]), ('a', 0, vec![3, 4, 5, 6])]);
    assert_eq!(r.in_flight(), 0);
    // When a slot is reused, the cookie must be different.
    let again = cookie(&r.submit(Request::Flush, 'd'));
    assert!(again != a && again != b && again != c);
    let late = proto::simple_reply(a, None);
    assert_eq!(feed(&mut r, &late).unwrap_err(), ReplyFault::Cookie(a.0));
    assert_eq!(r.handle(&late).unwrap_err(), ReplyFault::Closed);
    assert_eq!(r.drain(), ['d']);
}

#[test]
fn read_reply_may_mix_chunks_and_holes() {
    let mut r = requests(true);
    let a = cookie(&r.submit(read(1024), 'a'));
    let b = cookie(&r.submit(
        Request::BlockStatus {
            offset: 0,
            len: 4096,
        },
        'b',
    ));
    let mut bytes = hole(a, 4096 + 512, 256, 0);
    bytes.extend(proto::chunk_header(
        b,
        chunk::BLOCK_STATUS,
        chunk::FLAG_DONE,
        4 + 16,
    ));
    for number in [CONTEXT, 1024, 0, 1 << 20, 3] {
        bytes.extend(number.to_be_bytes());
    }
    bytes.extend(data(a, 4096, &[7; 512], false));
    bytes.extend(data(a, 4096 + 768, &[8; 256], false));
    bytes.extend(proto::done_chunk(a));
    let (ends, got) = feed(&mut r, &bytes).unwrap();
    let extent = |len, kind| Extent { len, kind };
    let extents = vec![
        extent(1024, ExtentKind::Data),
        extent(3072, ExtentKind::Hole),
    ];
    let status = RequestOutcome { extents, ..FINE };
    assert_eq!(ends, [('b', status), ('a', FINE)]);
    let want = [
        ('a', 512, vec![0; 256]),
        ('a', 0, vec![7; 512]),
        ('a', 768, vec![8; 256]),
    ];
    assert_eq!(got, want);
    // The reply is completed by a hole, then there is an error with a message.
    let c = cookie(&r.submit(read(512), 'c'));
    let d = cookie(&r.submit(read(512), 'd'));
    let mut bytes = hole(c, 4096, 512, chunk::FLAG_DONE);
    bytes.extend(proto::chunk_header(
        d,
        chunk::ERROR,
        chunk::FLAG_DONE,
        6 + 4,
    ));
    bytes.extend(5u32.to_be_bytes());
    bytes.extend(4u16.to_be_bytes());
    bytes.extend(b"bad\x07");
    let (ends, _) = feed(&mut r, &bytes).unwrap();
    assert_eq!(ends[0], ('c', FINE));
    let error = ends[1].1.result.clone().unwrap_err().to_string();
    assert!(error.ends_with("error 5: bad"), "{error}");
}

#[test]
fn malformed_replies_are_faults() {
    use ReplyFault::{Data, Extents, Form, Kind, Length, Magic, Missing, NoError};
    let status = |c: Cookie, len: u32, numbers: &[u32]| {
        let mut out = proto::chunk_header(c, chunk::BLOCK_STATUS, 1, len).to_vec();
        numbers.iter().for_each(|n| out.extend(n.to_be_bytes()));
        out
    };
    let header = |c, kind, len| proto::chunk_header(c, kind, 1, len).to_vec();
    let error = |c, len: u32, rest: &[u8]| [&header(c, chunk::ERROR, len)[..], rest].concat();
    let length = |kind, len| Length { kind, len };
    let bad = |offset, len| Data { offset, len };
    // Reply for a read of bytes 4096 to 5120 and a status request.
    type BuildReply<'a> = &'a dyn Fn(Cookie, Cookie) -> Vec<u8>;
    let cases: &[(BuildReply<'_>, ReplyFault)] = &[
        (&|_, _| vec![0; 20], Magic(0)),
        (&|a, _| proto::simple_reply(a, None).to_vec(), Form),
        (&|a, _| proto::done_chunk(a), Missing { offset: 4096 }),
        (
            &|a, _| data(a, 4096, &[0; 1000], true),
            Missing { offset: 4096 },
        ),
        (&|a, _| data(a, 0, &[0; 512], true), bad(0, 512)),
        (&|a, _| data(a, 5120, &[0; 1], true), bad(5120, 1)),
        (&|a, _| data(a, 4097, &[0; 1024], true), bad(4097, 1024)),
        (&|a, _| data(a, u64::MAX, &[0; 8], true), bad(u64::MAX, 8)),
        (&|a, _| header(a, chunk::OFFSET_DATA, 8), length(1, 8)),
        (&|a, _| header(a, chunk::OFFSET_HOLE, 13), length(2, 13)),
        (&|a, _| hole(a, 4096, 0, 1), bad(4096, 0)),
        (
            &|a, _| [data(a, 4096, &[0; 9], false), hole(a, 4104, 9, 0)].concat(),
            bad(4104, 9),
        ),
        (&|a, _| header(a, chunk::NONE, 1), length(0, 1)),
        (
            &|a, _| proto::chunk_header(a, chunk::NONE, 0, 0).to_vec(),
            length(0, 0),
        ),
        (&|a, _| header(a, chunk::BLOCK_STATUS, 12), Kind { kind: 5 }),
        (&|a, _| header(a, 77, 0), Kind { kind: 77 }),
        (&|_, b| data(b, 0, &[0; 8], true), Kind { kind: 1 }),
        (&|_, b| proto::done_chunk(b), Extents),
        (&|_, b| status(b, 4, &[CONTEXT]), length(5, 4)),
        (&|_, b| status(b, 13, &[CONTEXT]), length(5, 13)),
        (&|_, b| status(b, 12, &[CONTEXT + 1, 512, 0]), Extents),
        (&|_, b| status(b, 12, &[CONTEXT, 0, 0]), Extents),
        (&|a, _| error(a, 5, &[]), length(chunk::ERROR, 5)),
        (
            &|a, _| error(a, 1 << 30, &[]),
            length(chunk::ERROR, 1 << 30),
        ),
        (
            &|a, _| error(a, 6, &[0, 0, 0, 5, 0, 1]),
            length(chunk::ERROR, 6),
        ),
        (&|a, _| error(a, 6, &[0; 6]), NoError),
    ];
    for (reply, want) in cases {
        let mut r = requests(true);
        let a = cookie(&r.submit(read(1024), 'a'));
        let b = cookie(&r.submit(
            Request::BlockStatus {
                offset: 0,
                len: 4096,
            },
            'b',
        ));
        assert_eq!(feed(&mut r, &reply(a, b)).unwrap_err(), *want);
        assert_eq!(r.drain().len(), 2);
    }
    let mut r = requests(false);
    let a = cookie(&r.submit(read(1024), 'a'));
    assert_eq!(feed(&mut r, &proto::done_chunk(a)).unwrap_err(), Form);
}

#[test]
fn reply_state_is_bounded() {
    let mut r = requests(true);
    let a = cookie(&r.submit(read(1 << 20), 'a'));
    let fault = (0..1 << 19).find_map(|n| feed(&mut r, &hole(a, 4096 + 2 * n, 1, 0)).err());
    assert_eq!(fault, Some(ReplyFault::TooManyPieces));
    let mut r = requests(true);
    let len = 1 << 30;
    let b = cookie(&r.submit(Request::BlockStatus { offset: 0, len }, 'b'));
    let number = 1 << 17;
    let mut bytes = proto::chunk_header(b, chunk::BLOCK_STATUS, 1, 4 + 8 * number).to_vec();
    bytes.extend(CONTEXT.to_be_bytes());
    for n in 0..number {
        bytes.extend(512u32.to_be_bytes());
        bytes.extend((n % 2 * 3).to_be_bytes());
    }
    let (ends, _) = feed(&mut r, &bytes).unwrap();
    assert_eq!(ends[0].1.extents.len(), super::requests::MAX_EXTENTS);
}

proptest! {
    /// Random bytes after a valid start must not cause a panic, or complete a read with missing
    /// data.
    #[test]
    fn hostile_stream_never_panics(
        bytes in proptest::collection::vec(any::<u8>(), 0..400),
        kinds in proptest::collection::vec((any::<bool>(), 0u16..8, 0u16..2, 0u32..64), 0..8),
    ) {
        let mut r = requests(true);
        let a = cookie(&r.submit(read(64), 'a'));
        let b = cookie(&r.submit(Request::BlockStatus { offset: 0, len: 4096 }, 'b'));
        let mut stream = Vec::new();
        let mut rest = bytes.iter().copied().cycle();
        for (first, kind, flags, len) in kinds {
            let kind = if kind == 7 { chunk::ERROR } else { kind };
            let cookie = if first { a } else { b };
            stream.extend(proto::chunk_header(cookie, kind, flags, len));
            stream.extend(rest.by_ref().take(len as usize));
        }
        stream.extend(&bytes);
        let mut stream = &stream[..];
        for _ in 0..10_000 {
            if let Some((_, at, left)) = r.payload() {
                prop_assert!(at + left <= 64);
                let n = left.min(stream.len());
                if n == 0 {
                    break;
                }
                r.handle_payload(n);
                stream = &stream[n..];
                continue;
            }
            match r.handle(stream) {
                Err(_) => break,
                Ok(Progress { consumed: 0, event: None }) => break,
                Ok(progress) => stream = &stream[progress.consumed..],
            }
        }
    }
}
