//! Disk I/O for requests, until the response is sent.

use std::ops::Range;
use std::sync::Arc;

use riser_block::{
    BlockDevice, BlockError, Buffer, ByteDevice, ExtentKind, LossCursor, Span, ZeroOptions,
};
use riser_memory::Memory;
use zerocopy::IntoBytes;

use super::channel::Reply;
use super::sys::{LseekOut, WriteOut};

/// Range size used for each allocation query by `lseek`, in bytes.
const SEEK_WINDOW: u64 = 1 << 30;

/// Reads a range into a device buffer and sends it to the kernel. If multiple transfers are
/// required, the data is assembled in separate memory, using one buffer at a time. Otherwise there
/// could be a deadlock, with all requests holding some device buffers and waiting for more.
pub(super) async fn read<D: BlockDevice>(
    device: Arc<ByteDevice<D>>,
    range: Range<u64>,
    reply: Reply,
) {
    let len = range.end - range.start;
    let span = device.first_piece(range.start, len);
    let result = if span.len as u64 == len {
        read_piece(&device, span)
            .await
            .map(|buffer| (buffer, span.head))
    } else {
        assemble(&device, range).await.map(|whole| (whole, 0))
    };
    match result {
        Ok((buffer, head)) => reply.succeed_with(buffer, head..head + len as usize),
        Err(error) => reply.fail(&error),
    }
}

async fn read_piece<D: BlockDevice>(
    device: &ByteDevice<D>,
    span: Span,
) -> Result<Buffer, BlockError> {
    let buffer = device.device().buffer(span.covering).await;
    device.read(span, buffer).await
}

async fn assemble<D: BlockDevice>(
    device: &ByteDevice<D>,
    range: Range<u64>,
) -> Result<Buffer, BlockError> {
    let len = (range.end - range.start) as usize;
    let whole = anonymous(len)?;
    let mut done = 0;
    while done < len {
        let span = device.first_piece(range.start + done as u64, (len - done) as u64);
        let buffer = read_piece(device, span).await?;
        copy(&buffer, span.head, &whole, done, span.len);
        done += span.len;
    }
    Ok(whole)
}

/// Writes data from a device buffer filled by the caller.
pub(super) async fn write<D: BlockDevice>(
    device: Arc<ByteDevice<D>>,
    (span, buffer): (Span, Buffer),
    fua: bool,
    reply: Reply,
) {
    match device.write(span, buffer, fua).await {
        Ok(()) => written(reply, span.len),
        Err(error) => reply.fail(&error),
    }
}

/// Writes data from separate memory, with one transfer at a time.
pub(super) async fn write_parked<D: BlockDevice>(
    device: Arc<ByteDevice<D>>,
    start: u64,
    bytes: Buffer,
    fua: bool,
    reply: Reply,
) {
    let mut done = 0;
    while done < bytes.len() {
        let span = device.first_piece(start + done as u64, (bytes.len() - done) as u64);
        let buffer = device.device().buffer(span.covering).await;
        copy(&bytes, done, &buffer, span.head, span.len);
        if let Err(error) = device.write(span, buffer, fua).await {
            return reply.fail(&error);
        }
        done += span.len;
    }
    written(reply, done);
}

/// Completes a write with `len` bytes written.
pub(super) fn written(reply: Reply, len: usize) {
    let out = WriteOut {
        size: (len as u32).into(),
        ..WriteOut::default()
    };
    reply.succeed(out.as_bytes());
}

/// Flushes for an open file, which already reported these lost writes.
pub(super) async fn flush<D: BlockDevice>(
    device: Arc<ByteDevice<D>>,
    losses: Option<Arc<LossCursor>>,
    reply: Reply,
) {
    let flushed = match losses {
        Some(losses) => device.flush_for(&losses).await,
        None => device.flush().await,
    };
    send_result(flushed, reply);
}

pub(super) async fn zero<D: BlockDevice>(
    device: Arc<ByteDevice<D>>,
    range: Range<u64>,
    options: ZeroOptions,
    reply: Reply,
) {
    send_result(device.write_zeroes(range, options).await, reply);
}

fn send_result(result: Result<(), BlockError>, reply: Reply) {
    match result {
        Ok(()) => reply.succeed(&[]),
        Err(error) => reply.fail(&error),
    }
}

/// Finds the next data or hole, starting at `from`.
pub(super) async fn seek<D: BlockDevice>(
    device: Arc<ByteDevice<D>>,
    from: u64,
    want_data: bool,
    reply: Reply,
) {
    let at = match find(&device, from, want_data).await {
        Ok(Some(at)) => at,
        Ok(None) if want_data => return reply.refuse(libc::ENXIO),
        // There is always a hole at the end of the file.
        Ok(None) => device.geometry().capacity,
        Err(error) => return reply.fail(&error),
    };
    let out = LseekOut { offset: at.into() };
    reply.succeed(out.as_bytes());
}

async fn find<D: BlockDevice>(
    device: &ByteDevice<D>,
    from: u64,
    want_data: bool,
) -> Result<Option<u64>, BlockError> {
    if !device.geometry().reports_status {
        // Everything is data. We don't want to scan a large disk just to find this out.
        return Ok(want_data.then_some(from));
    }
    let capacity = device.geometry().capacity;
    let mut at = from;
    while at < capacity {
        for extent in device.status(at..capacity.min(at + SEEK_WINDOW)).await? {
            if (extent.kind == ExtentKind::Data) == want_data {
                return Ok(Some(at));
            }
            at += extent.len;
        }
    }
    Ok(None)
}

/// Allocates memory which isn't part of the device.
pub(super) fn anonymous(len: usize) -> Result<Buffer, BlockError> {
    Buffer::anonymous(len).map_err(|error| BlockError::Io(error.to_string()))
}

/// Copies `len` bytes between buffers.
pub(super) fn copy(from: &Buffer, at: usize, to: &Buffer, to_at: usize, len: usize) {
    let (from, to) = (from.slice(), to.slice());
    Memory::copy(
        from.memory(),
        from.offset() + at,
        to.memory(),
        to.offset() + to_at,
        len,
    );
}
