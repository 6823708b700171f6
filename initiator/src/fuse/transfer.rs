//! Bytes between the kernel's requests and the disk.

use fuser::ReplyData;

use crate::block::{BlockDevice, BlockError, Buffer, ByteDevice, ExtentKind, Span, task};

/// Bytes whose allocation one step of `lseek` asks for.
const SEEK_WINDOW: u64 = 1 << 30;

/// A piece of a write: where it goes, and its bytes.
pub(super) type Piece = (Span, Option<Buffer>);

/// Answers a read with a part of a buffer.
#[allow(
    unsafe_code,
    reason = "shows the kernel a buffer that is addressed by pointer only"
)]
pub(super) fn send(reply: ReplyData, buffer: &Buffer, span: &Span) {
    let slice = buffer.slice();
    // SAFETY: the operation that filled the buffer is done, and only the holder of a buffer may
    // start another on it; so nothing writes it during the call.
    unsafe {
        slice
            .memory()
            .with_bytes(slice.offset() + span.head, span.len, |data| {
                reply.data(data);
            });
    }
}

/// Answers a read that took several transfers.
pub(super) fn send_all(reply: ReplyData, parts: &[(Buffer, Span)]) {
    let mut data = Vec::with_capacity(parts.iter().map(|(_, span)| span.len).sum());
    for (buffer, span) in parts {
        let at = data.len();
        data.resize(at + span.len, 0);
        buffer.slice().read(span.head, &mut data[at..]);
    }
    reply.data(&data);
}

/// Writes all pieces side by side; with `fua` they are on the medium afterwards. Those without a
/// buffer have their bytes in `copy`, in order.
pub(super) async fn write_pieces<D: BlockDevice>(
    device: &ByteDevice<D>,
    pieces: Vec<Piece>,
    mut copy: &[u8],
    fua: bool,
) -> Result<(), BlockError> {
    let writes = pieces.into_iter().map(|(span, buffer)| {
        let late = if buffer.is_none() {
            let (part, rest) = copy.split_at(span.len);
            copy = rest;
            part
        } else {
            &[]
        };
        async move {
            let buffer = match buffer {
                Some(buffer) => buffer,
                None => {
                    let buffer = device.device().buffer(span.covering).await;
                    buffer.slice().write(span.head, late);
                    buffer
                }
            };
            device.write(span, buffer, fua).await
        }
    });
    task::join_all(writes).await.into_iter().collect()
}

/// The first byte from `from` on that is in data, or in a hole.
pub(super) async fn seek<D: BlockDevice>(
    device: &ByteDevice<D>,
    from: u64,
    want_data: bool,
) -> Result<Option<u64>, BlockError> {
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
