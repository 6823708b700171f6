//! `riser read` and `riser write`: copy a range of a disk to or from a file or standard stream.
//!
//! Up to [`IN_FLIGHT`] pieces of at most [`PIECE`] bytes are in flight. The stream is accessed in
//! order.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Instant;

use indicatif::ProgressBar;
use riser_block::{BlockDevice, BlockError, Buffer, ByteDevice, Span, task};
use serde::Serialize;

use super::args::{Global, ReadArgs, WriteArgs};
use super::disk::{Disk, open};
use super::exit::{CliError, Exit};
use super::{guard, output, units};

/// Maximum number of pieces in flight.
const IN_FLIGHT: usize = 16;
/// Maximum size of a piece in bytes.
const PIECE: u64 = 1 << 20;

#[derive(Serialize)]
struct CopyReport {
    url: String,
    offset: u64,
    bytes: u64,
    seconds: f64,
    bytes_per_second: f64,
}

impl CopyReport {
    fn new(url: String, offset: u64, bytes: u64, began: Instant) -> Self {
        let seconds = began.elapsed().as_secs_f64();
        Self {
            url,
            offset,
            bytes,
            seconds,
            bytes_per_second: bytes as f64 / seconds.max(1e-9),
        }
    }

    fn line(&self) -> String {
        format!(
            "{} in {:.3} s, {}/s",
            units::show_size(self.bytes),
            self.seconds,
            units::show_size(self.bytes_per_second as u64)
        )
    }
}

fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

/// Returns the length of the requested range after checking that it is within the disk.
fn range(disk: &Disk, offset: u64, length: Option<u64>) -> Result<u64, CliError> {
    let capacity = disk.geometry().capacity;
    let left = capacity.checked_sub(offset);
    match (left, length) {
        (Some(left), None) => Ok(left),
        (Some(left), Some(length)) if length <= left => Ok(length),
        _ => {
            let size = units::show_size(capacity);
            let end = format!("beyond the end of the disk, which has {size} ({capacity} bytes)");
            let what = match length {
                Some(length) => format!("{length} bytes at byte {offset} extend {end}"),
                None => format!("byte {offset} is {end}"),
            };
            Err(CliError::new(Exit::Usage, what))
        }
    }
}

type Finished<T> = mpsc::Receiver<Result<T, BlockError>>;

/// Waits for a piece. This always returns, because each request either receives a response or times
/// out.
fn wait<T>(piece: &Finished<T>, what: impl Fn() -> String) -> Result<T, CliError> {
    match piece.recv() {
        Ok(result) => result.map_err(|e| CliError::block(what(), e)),
        Err(mpsc::RecvError) => Err(CliError::new(Exit::Failure, what())),
    }
}

/// Runs `riser read`.
pub(super) fn read(args: &ReadArgs, global: &Global) -> Result<(), CliError> {
    let disk = open(&args.url, &args.link, global.timeout, true)?;
    let total = range(&disk, args.offset, args.length)?;
    let mut sink: Box<dyn Write> = if is_standard(&args.file) {
        Box::new(io::stdout().lock())
    } else {
        Box::new(
            File::create(&args.file)
                .map_err(|e| CliError::io(format!("cannot create {}", args.file.display()), e))?,
        )
    };
    let bar = output::progress(Some(total), global);
    let began = Instant::now();
    let device = Arc::new(ByteDevice::new(disk.clone()));
    let end = args.offset + total;
    let mut pieces: VecDeque<(u64, Finished<(Buffer, Span)>)> = VecDeque::new();
    let mut at = args.offset;
    let mut scratch = Vec::new();
    while at < end || !pieces.is_empty() {
        while at < end && pieces.len() < IN_FLIGHT {
            let span = device.first_piece(at, (end - at).min(PIECE));
            pieces.push_back((at, start_read(&device, span)));
            at += span.len as u64;
        }
        let Some((at, piece)) = pieces.pop_front() else {
            break;
        };
        let (buffer, span) = wait(&piece, || {
            format!("reading {} at byte {at} failed", args.url)
        })?;
        scratch.resize(span.len, 0);
        buffer.slice().read(span.head, &mut scratch);
        drop(buffer);
        match sink.write_all(&scratch) {
            // The pipe was closed by its reader.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            Err(e) => {
                let what = format!("cannot write to {}", args.file.display());
                return Err(CliError::io(what, e));
            }
            Ok(()) => bar.inc(span.len as u64),
        }
    }
    sink.flush()
        .map_err(|e| CliError::io(format!("cannot write to {}", args.file.display()), e))?;
    bar.finish_and_clear();
    disk.close();
    // Don't print anything else to standard output.
    if is_standard(&args.file) {
        return Ok(());
    }
    let copied = CopyReport::new(args.url.to_string(), args.offset, total, began);
    output::result(&copied, global, |out| {
        writeln!(out, "read {}", copied.line())
    })
}

fn start_read(device: &Arc<ByteDevice<Disk>>, span: Span) -> Finished<(Buffer, Span)> {
    let (done, finished) = mpsc::sync_channel(1);
    let device = device.clone();
    task::spawn(async move {
        let buffer = device.device().buffer(span.covering).await;
        let result = device.read(span, buffer).await;
        // If another piece has failed, the receiver is closed.
        let _ = done.send(result.map(|buffer| (buffer, span)));
    });
    finished
}

/// Runs `riser write`.
pub(super) fn write(args: &WriteArgs, global: &Global) -> Result<(), CliError> {
    let disk = open(&args.url, &args.link, global.timeout, false)?;
    if disk.geometry().read_only {
        return Err(CliError::new(
            Exit::Failure,
            format!("{} is write-protected", args.url),
        ));
    }
    let most = range(&disk, args.offset, args.length)?;
    if !args.overwrite {
        guard::check(&disk, &args.url, global)?;
    }
    let mut source = Source::open(args)?;
    // Don't write any data if the file is too large.
    if let Some(len) = source.len.filter(|len| *len > most) {
        let (file, offset) = (args.file.display(), args.offset);
        let what =
            format!("{file} has {len} bytes, but the disk only has {most} from byte {offset}");
        return Err(CliError::new(Exit::Usage, what));
    }
    let bar = output::progress(source.len, global);
    let began = Instant::now();
    let device = Arc::new(ByteDevice::new(disk.clone()));
    let end = args.offset + args.length.unwrap_or(most);
    let at = write_pieces(args, &mut source, &device, end, &bar)?;
    let written = at - args.offset;
    if args.length.is_some_and(|length| written < length) {
        let what = format!(
            "unexpected end of {} after {written} bytes",
            args.file.display()
        );
        return Err(CliError::new(Exit::Failure, what));
    }
    // A stream of unknown length may be too large for the disk. Check whether there is another
    // byte.
    if args.length.is_none() && at == end && source.fill(&mut [0])? > 0 {
        let what = format!("the disk is too small for {}", args.file.display());
        return Err(CliError::new(Exit::Failure, what));
    }
    // Without a flush, completed writes could be lost in a volatile cache.
    if !args.no_flush {
        task::block_on(device.flush())
            .map_err(|e| CliError::block(format!("flushing {} failed", args.url), e))?;
    }
    bar.finish_and_clear();
    disk.close();
    let copied = CopyReport::new(args.url.to_string(), args.offset, written, began);
    output::result(&copied, global, |out| {
        writeln!(out, "wrote {}", copied.line())
    })
}

/// Writes the stream from the offset up to `end`, or to the end of the stream. Returns the offset
/// after the last byte.
fn write_pieces(
    args: &WriteArgs,
    source: &mut Source<'_>,
    device: &Arc<ByteDevice<Disk>>,
    end: u64,
    bar: &ProgressBar,
) -> Result<u64, CliError> {
    let failed = |at: u64| format!("writing {} at byte {at} failed", args.url);
    let mut pieces: VecDeque<(u64, u64, Finished<()>)> = VecDeque::new();
    let mut at = args.offset;
    let mut scratch = vec![0; PIECE as usize];
    loop {
        let span = device.first_piece(at, (end - at).min(PIECE));
        let got = source.fill(&mut scratch[..span.len])?;
        if got == 0 {
            break;
        }
        // Wait for the oldest piece first, so that we report the lowest offset on error.
        if pieces.len() == IN_FLIGHT
            && let Some((at, len, piece)) = pieces.pop_front()
        {
            wait(&piece, || failed(at))?;
            bar.inc(len);
        }
        let span = device.span(at, got);
        pieces.push_back((at, got as u64, start_write(device, span, &scratch[..got])));
        at += got as u64;
    }
    for (at, len, piece) in pieces {
        wait(&piece, || failed(at))?;
        bar.inc(len);
    }
    Ok(at)
}

fn start_write(device: &Arc<ByteDevice<Disk>>, span: Span, data: &[u8]) -> Finished<()> {
    let (done, finished) = mpsc::sync_channel(1);
    let buffer = task::block_on(device.device().buffer(span.covering));
    buffer.slice().write(span.head, data);
    let device = device.clone();
    task::spawn(async move {
        let _ = done.send(device.write(span, buffer, false).await);
    });
    finished
}

/// A file or standard input to be written to a disk.
struct Source<'a> {
    path: &'a Path,
    stream: Box<dyn Read>,
    /// Number of bytes to write, if known in advance.
    len: Option<u64>,
}

impl<'a> Source<'a> {
    fn open(args: &'a WriteArgs) -> Result<Self, CliError> {
        let path = args.file.as_path();
        if is_standard(path) {
            let stream = Box::new(io::stdin().lock());
            let len = args.length;
            return Ok(Self { path, stream, len });
        }
        let file = File::open(path).map_err(|e| unreadable(path, e))?;
        let meta = file.metadata().map_err(|e| unreadable(path, e))?;
        let known = meta.is_file().then_some(meta.len());
        Ok(Self {
            path,
            stream: Box::new(file),
            len: args.length.or(known),
        })
    }

    /// Reads until the buffer is full or the end of the stream is reached.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, CliError> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.stream.read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(unreadable(self.path, e)),
            }
        }
        Ok(filled)
    }
}

fn unreadable(path: &Path, error: io::Error) -> CliError {
    CliError::io(format!("cannot read {}", path.display()), error)
}
