//! Support for requests with any byte offset and length on a block device.
//!
//! To read a partial block, we read the whole block. To write a partial block, we read the blocks
//! at both edges, modify them and write them back. We hold [`RangeLocks`] on these blocks in the
//! meantime, so that we don't lose other changes made via the same [`ByteDevice`]. Note that this
//! doesn't protect against writes to the same block from other initiators, just like with any other
//! disk.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_memory::Memory;

use super::losses::Writes;
use super::{
    BlockDevice, BlockError, Buffer, Extent, ExtentKind, Geometry, LossCursor, RangeLocks,
    ZeroOptions,
};

/// Max number of partial writes that can read their edge blocks at the same time. These buffers are
/// allocated when the device is opened, so that a partial write doesn't require any other buffer
/// when it already has its data.
const EDGE_SLOTS: usize = 4;

/// Max size of a write used to zero data if the device doesn't have a command for this, in bytes.
const ZERO_PIECE: u64 = 256 << 10;

/// The zero buffer must not use more than this fraction of the device buffers.
const ZERO_SHARE: u64 = 64;

/// Byte range, and the whole blocks that cover it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Device offset of the first covering block, in bytes.
    pub start: u64,
    /// Length of the covering blocks in bytes.
    pub covering: usize,
    /// Offset of the range in the covering blocks.
    pub head: usize,
    /// Length of the range in bytes.
    pub len: usize,
}

impl Span {
    /// Creates a span for `len` bytes at `offset`. The caller must check that it is within the
    /// device.
    #[must_use]
    pub fn new(block_size: u32, offset: u64, len: usize) -> Self {
        let block = u64::from(block_size);
        let start = offset - offset % block;
        let end = (offset + len as u64).next_multiple_of(block);
        Self {
            start,
            covering: (end - start) as usize,
            head: (offset - start) as usize,
            len,
        }
    }

    /// Returns whether the range is aligned to blocks.
    #[must_use]
    pub fn is_aligned(&self) -> bool {
        self.covering == self.len
    }

    /// Number of bytes from the end of the range to the end of the covering blocks.
    fn tail(&self) -> usize {
        self.covering - self.head - self.len
    }

    fn range(&self) -> Range<u64> {
        self.start..self.start + self.covering as u64
    }
}

/// Block device with support for any byte range, see the module documentation.
#[derive(Debug)]
pub struct ByteDevice<D> {
    device: Arc<D>,
    locks: RangeLocks,
    // Slot i can be used while holding a lock on i..i+1 in `edge_locks`.
    edge_locks: RangeLocks,
    edges: Vec<EdgeSlot>,
    /// Zero buffer, used if the device doesn't have a command to write zeroes. It is shared by all
    /// requests and allocated when the device is opened, so a request doesn't need to wait for a
    /// buffer and we don't use up buffers needed by other requests.
    zeroes: Option<Arc<Buffer>>,
    /// Number of losses that have been reported to at least one client.
    reported: AtomicU64,
    writes: Writes,
}

/// Slot for a buffer reserved for edge blocks.
#[derive(Clone, Debug)]
struct EdgeSlot(Arc<Mutex<Option<Buffer>>>);

impl EdgeSlot {
    /// Returns the reserved buffer. It is put back on drop, even if the operation fails, because
    /// the pool may not have a replacement.
    fn take_reserved(&self) -> Option<Buffer> {
        let kept = self.lock().take()?;
        let slice = kept.slice().clone();
        let lease = EdgeLease(self.clone(), Some(kept));
        Some(Buffer::leased(slice, Box::new(lease)))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Buffer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct EdgeLease(EdgeSlot, Option<Buffer>);

impl Drop for EdgeLease {
    fn drop(&mut self) {
        *self.0.lock() = self.1.take();
    }
}

/// Allocates a zero buffer if the device doesn't have a command to write zeroes.
fn run_of_zeroes<D: BlockDevice>(device: &D) -> Option<Arc<Buffer>> {
    let geometry = device.geometry();
    if geometry.max_write_zeroes > 0 || geometry.read_only {
        return None;
    }
    let block = u64::from(geometry.block_size);
    let most = ZERO_PIECE
        .min(geometry.split_len().into())
        .min(device.buffer_bytes() / ZERO_SHARE);
    let len = (most - most % block).max(block) as usize;
    let run = device.try_buffer(len)?;
    run.slice().fill(0, len, 0);
    Some(Arc::new(run))
}

impl<D: BlockDevice> ByteDevice<D> {
    /// Creates a new byte device. All writers to the same export must use the same instance.
    #[must_use]
    pub fn new(device: Arc<D>) -> Self {
        let block = device.geometry().block_size as usize;
        let edges = (0..EDGE_SLOTS)
            .map(|_| EdgeSlot(Arc::new(Mutex::new(device.try_buffer(block)))))
            .collect();
        Self {
            zeroes: run_of_zeroes(&*device),
            reported: AtomicU64::new(0),
            writes: Writes::default(),
            device,
            locks: RangeLocks::new(),
            edge_locks: RangeLocks::new(),
            edges,
        }
    }

    /// Underlying block device.
    #[must_use]
    pub fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// Size and limits of the underlying device.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }

    /// Returns the span for a byte range.
    #[must_use]
    pub fn span(&self, offset: u64, len: usize) -> Span {
        Span::new(self.geometry().block_size, offset, len)
    }

    /// Returns the first piece of a request: as much as possible in a single transfer.
    #[must_use]
    pub fn first_piece(&self, offset: u64, len: u64) -> Span {
        self.first_piece_within(offset, len, u64::from(self.geometry().split_len()))
    }

    /// Returns the first piece of a request: as much as possible with a buffer of `most` bytes, but
    /// at least the part of it in the first block.
    #[must_use]
    pub fn first_piece_within(&self, offset: u64, len: u64, most: u64) -> Span {
        let block = u64::from(self.geometry().block_size);
        let most = most.min(u64::from(self.geometry().split_len()));
        let end = offset - offset % block + (most - most % block).max(block);
        self.span(offset, len.min(end - offset) as usize)
    }

    /// Allocates a buffer for the covering blocks of a span; `None` if the device doesn't have a
    /// free buffer.
    #[must_use]
    pub fn try_buffer(&self, span: &Span) -> Option<Buffer> {
        self.device.try_buffer(span.covering)
    }

    /// Reads the covering blocks; the range starts at `span.head` in the buffer.
    ///
    /// # Errors
    /// Returns the device error.
    pub async fn read(&self, span: Span, buffer: Buffer) -> Result<Buffer, BlockError> {
        self.device.read(span.start, buffer).await
    }

    /// Writes the range. The data must be at `span.head` in the buffer; the other bytes in the
    /// buffer are not used.
    ///
    /// # Errors
    /// Returns the device error.
    pub async fn write(&self, span: Span, buffer: Buffer, fua: bool) -> Result<(), BlockError> {
        self.check_writable()?;
        let _write = self.writes.start_write();
        let _guard = if span.is_aligned() {
            self.locks.shared(span.range()).await
        } else {
            let guard = self.locks.exclusive(span.range()).await;
            self.fill_edges(&span, &buffer).await?;
            guard
        };
        self.device.write(span.start, buffer, fua).await.map(drop)
    }

    /// Flushes all completed writes to stable storage.
    ///
    /// # Errors
    /// Returns the device error. Lost writes are only reported once, see [`Self::flush_for`].
    pub async fn flush(&self) -> Result<(), BlockError> {
        self.device.flush().await
    }

    /// Creates a cursor for a new client. This client will not see losses that have already been
    /// reported to another client.
    #[must_use]
    pub fn loss_cursor(&self) -> LossCursor {
        LossCursor::new(self.reported.load(Ordering::Acquire))
    }

    /// Same as [`Self::flush`] if there are multiple clients: each client is notified about each
    /// loss.
    ///
    /// # Errors
    /// Returns the device error. This can be [`BlockError::WritesLost`] for a loss that was
    /// previously reported, but only to other clients.
    pub async fn flush_for(&self, cursor: &LossCursor) -> Result<(), BlockError> {
        let (ended, before) = (self.writes.completed_writes(), self.device.losses());
        let flushed = self.device.flush().await;
        let losses = self.device.losses();
        let is_new = cursor.is_behind(losses);
        // If there was no write in flight, this flush covers all acknowledged writes. Otherwise the
        // lost data may belong to a write that was acknowledged after the flush was started, so we
        // report it on the next flush.
        let reported = match self.writes.started_writes() == ended {
            true => losses,
            false => before,
        };
        cursor.advance(reported);
        self.reported.fetch_max(reported, Ordering::AcqRel);
        flushed?;
        match is_new {
            true => Err(BlockError::WritesLost),
            false => Ok(()),
        }
    }

    /// Discards all whole blocks in this range.
    ///
    /// # Errors
    /// Returns the device error.
    pub async fn discard(&self, range: Range<u64>) -> Result<(), BlockError> {
        self.check_writable()?;
        let _write = self.writes.start_write();
        let inner = self.inner_blocks(&range);
        let most = self.geometry().max_discard;
        if inner.is_empty() || most == 0 {
            return Ok(());
        }
        let _guard = self.locks.shared(inner.clone()).await;
        for piece in pieces(inner, most) {
            self.device.discard(piece).await?;
        }
        Ok(())
    }

    /// Sets the range to zero.
    ///
    /// # Errors
    /// Returns the device error, or [`BlockError::Unsupported`] if `fast` is set and the range
    /// isn't aligned to blocks.
    pub async fn write_zeroes(
        &self,
        range: Range<u64>,
        options: ZeroOptions,
    ) -> Result<(), BlockError> {
        self.check_writable()?;
        let _write = self.writes.start_write();
        let inner = self.inner_blocks(&range);
        let has_command = self.geometry().max_write_zeroes > 0;
        if options.fast && !(has_command && inner == range) {
            return Err(BlockError::Unsupported);
        }
        if inner == range {
            let _guard = self.locks.shared(inner.clone()).await;
            return self.zero_blocks(inner, options).await;
        }
        let block = u64::from(self.geometry().block_size);
        let outer = range.start - range.start % block..range.end.next_multiple_of(block);
        let _guard = self.locks.exclusive(outer).await;
        if inner.is_empty() && range.end.div_ceil(block) - range.start / block == 1 {
            return self.zero_part(range, options.fua).await;
        }
        // There can be a partial block on each side; `inner` may be empty.
        if range.start < inner.start {
            self.zero_part(range.start..inner.start, options.fua)
                .await?;
        }
        if inner.end < range.end {
            self.zero_part(inner.end..range.end, options.fua).await?;
        }
        if inner.is_empty() {
            return Ok(());
        }
        self.zero_blocks(inner, options).await
    }

    /// Returns the allocation status of the range, starting at its first byte. The result will
    /// never exceed the range.
    ///
    /// # Errors
    /// Returns the device error.
    pub async fn status(&self, range: Range<u64>) -> Result<Vec<Extent>, BlockError> {
        if !self.geometry().reports_status {
            return Ok(vec![Extent {
                len: range.end - range.start,
                kind: ExtentKind::Data,
            }]);
        }
        let block = u64::from(self.geometry().block_size);
        let outer = range.start - range.start % block..range.end.next_multiple_of(block);
        let mut skip = range.start - outer.start;
        let mut left = range.end - range.start;
        let mut extents = self.device.status(outer).await?;
        extents.retain_mut(|e| {
            let skipped = skip.min(e.len);
            skip -= skipped;
            e.len = (e.len - skipped).min(left);
            left -= e.len;
            e.len > 0
        });
        Ok(extents)
    }

    fn check_writable(&self) -> Result<(), BlockError> {
        if self.geometry().read_only {
            return Err(BlockError::ReadOnly);
        }
        Ok(())
    }

    /// Returns the range of whole blocks. If there are no whole blocks, this returns an empty
    /// range, and if there are partial blocks on both sides, the empty range is between them.
    fn inner_blocks(&self, range: &Range<u64>) -> Range<u64> {
        let block = u64::from(self.geometry().block_size);
        let start = range.start.next_multiple_of(block);
        let end = range.end - range.end % block;
        start..end.max(start)
    }

    /// Reads the blocks that are only partially covered by the span, and copies the remaining data
    /// of these blocks to the buffer around the range.
    async fn fill_edges(&self, span: &Span, buffer: &Buffer) -> Result<(), BlockError> {
        let block = self.geometry().block_size as usize;
        let last = span.covering - block;
        let to = buffer.slice();
        let copy = |edge: &Buffer, from: usize, at: usize, len: usize| {
            let edge = edge.slice();
            Memory::copy(
                edge.memory(),
                edge.offset() + from,
                to.memory(),
                to.offset() + at,
                len,
            );
        };
        let head = span.head;
        let tail = span.tail();
        if head > 0 {
            // If the range is within a single block, we only need one READ for both edges.
            let both = last == 0 && tail > 0;
            self.with_edge(span.start, |edge| {
                copy(edge, 0, 0, head);
                if both {
                    copy(edge, block - tail, span.covering - tail, tail);
                }
                None
            })
            .await?;
            if both {
                return Ok(());
            }
        }
        if tail > 0 {
            self.with_edge(span.start + last as u64, |edge| {
                copy(edge, block - tail, span.covering - tail, tail);
                None
            })
            .await?;
        }
        Ok(())
    }

    /// Sets a range in a single block to zero. The caller must hold an exclusive lock on this
    /// block.
    async fn zero_part(&self, range: Range<u64>, fua: bool) -> Result<(), BlockError> {
        let block = u64::from(self.geometry().block_size);
        let start = range.start - range.start % block;
        self.with_edge(start, |edge| {
            edge.slice().fill(
                (range.start - start) as usize,
                (range.end - range.start) as usize,
                0,
            );
            Some(fua)
        })
        .await
    }

    /// Reads a block into an edge buffer and passes it to `f`. If it returns a value, the block is
    /// written back using this FUA flag.
    async fn with_edge(
        &self,
        start: u64,
        f: impl FnOnce(&Buffer) -> Option<bool>,
    ) -> Result<(), BlockError> {
        let block = self.geometry().block_size;
        let slot = (start / u64::from(block)) % EDGE_SLOTS as u64;
        let _turn = self.edge_locks.exclusive(slot..slot + 1).await;
        let buffer = self.edges[slot as usize]
            .take_reserved()
            .or_else(|| self.device.try_buffer(block as usize))
            .ok_or_else(|| BlockError::Io("no buffer for a partial block".into()))?;
        let buffer = self.device.read(start, buffer).await?;
        if let Some(fua) = f(&buffer) {
            self.device.write(start, buffer, fua).await?;
        }
        Ok(())
    }

    /// Sets whole blocks to zero, using commands if supported, or multiple writes from the zero
    /// buffer.
    async fn zero_blocks(&self, range: Range<u64>, options: ZeroOptions) -> Result<(), BlockError> {
        let most = self.geometry().max_write_zeroes;
        if most > 0 {
            for piece in pieces(range, most) {
                self.device.write_zeroes(piece, options).await?;
            }
            return Ok(());
        }
        let run = self.zeroes.as_ref();
        let run = run.ok_or_else(|| BlockError::Io("no buffer for zeroes".into()))?;
        let mut buffer = Buffer::leased(run.slice().clone(), Box::new(run.clone()));
        for piece in pieces(range, buffer.len() as u64) {
            // Only the last piece can be shorter.
            buffer.set_len((piece.end - piece.start) as usize);
            buffer = self.device.write(piece.start, buffer, options.fua).await?;
        }
        Ok(())
    }
}

fn pieces(range: Range<u64>, most: u64) -> impl Iterator<Item = Range<u64>> + Send {
    let mut at = range.start;
    std::iter::from_fn(move || {
        (at < range.end).then(|| {
            let piece = at..range.end.min(at + most);
            at = piece.end;
            piece
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::MemoryDevice;
    use super::super::task::{block_on, spawn};
    use super::*;
    use proptest::prelude::*;
    use std::sync::mpsc;

    const SIZE: u64 = 64 * 4096;

    fn byte_device(block: u32, zeroes: bool) -> ByteDevice<MemoryDevice> {
        let device = MemoryDevice::new(SIZE, block).unwrap().with_geometry(|g| {
            g.max_transfer = 32768;
            if !zeroes {
                g.max_write_zeroes = 0;
            }
        });
        ByteDevice::new(Arc::new(device))
    }

    #[test]
    fn requests_split_at_optimal_length() {
        let device = MemoryDevice::new(SIZE, 512).unwrap().with_geometry(|g| {
            (g.max_transfer, g.optimal_transfer) = (32768, 8192);
        });
        let dev = ByteDevice::new(Arc::new(device));
        assert_eq!(dev.first_piece(512, 32768).len, 8192);
        let buffer = dev.device().try_buffer(32768).unwrap();
        assert!(block_on(dev.device().read(0, buffer)).is_ok());
    }

    /// Disk which loses its cache during the first flush. This flush will fail because it was
    /// started before the loss, and then one of the flushes started after the loss will also fail.
    #[derive(Debug)]
    struct LossyDisk {
        disk: MemoryDevice,
        flushes: AtomicU64,
    }

    impl BlockDevice for LossyDisk {
        fn geometry(&self) -> &Geometry {
            self.disk.geometry()
        }

        fn try_buffer(&self, len: usize) -> Option<Buffer> {
            self.disk.try_buffer(len)
        }

        fn buffer_bytes(&self) -> u64 {
            self.disk.buffer_bytes()
        }

        fn wake_when_free(&self, waker: &std::task::Waker) {
            self.disk.wake_when_free(waker);
        }

        fn losses(&self) -> u64 {
            self.flushes.load(Ordering::Relaxed).min(1)
        }

        async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer, BlockError> {
            self.disk.read(offset, buffer).await
        }

        async fn write(
            &self,
            offset: u64,
            buffer: Buffer,
            fua: bool,
        ) -> Result<Buffer, BlockError> {
            self.disk.write(offset, buffer, fua).await
        }

        async fn flush(&self) -> Result<(), BlockError> {
            match self.flushes.fetch_add(1, Ordering::Relaxed) {
                0 | 1 => Err(BlockError::WritesLost),
                _ => Ok(()),
            }
        }

        async fn discard(&self, range: Range<u64>) -> Result<(), BlockError> {
            self.disk.discard(range).await
        }

        async fn write_zeroes(
            &self,
            range: Range<u64>,
            options: ZeroOptions,
        ) -> Result<(), BlockError> {
            self.disk.write_zeroes(range, options).await
        }

        async fn status(&self, range: Range<u64>) -> Result<Vec<Extent>, BlockError> {
            self.disk.status(range).await
        }
    }

    /// A flush doesn't cover writes that are acknowledged after it was started.
    #[test]
    fn loss_during_write_reaches_next_flush() {
        let dev = ByteDevice::new(Arc::new(LossyDisk {
            disk: MemoryDevice::new(SIZE, 512).unwrap(),
            flushes: AtomicU64::new(0),
        }));
        let (first, second) = (dev.loss_cursor(), dev.loss_cursor());
        let flush = |cursor| block_on(dev.flush_for(cursor));
        let write = dev.writes.start_write();
        assert_eq!(flush(&first), Err(BlockError::WritesLost));
        drop(write);
        let again = dev.loss_cursor();
        assert_eq!(flush(&second), Err(BlockError::WritesLost));
        assert_eq!(flush(&first), Err(BlockError::WritesLost));
        assert_eq!(flush(&again), Err(BlockError::WritesLost), "reconnected");
        for client in [&first, &second, &again, &dev.loss_cursor()] {
            assert_eq!(flush(client), Ok(()));
        }
    }

    #[test]
    fn partial_write_succeeds_after_failed_one() {
        let device = MemoryDevice::new(SIZE, 512)
            .unwrap()
            .with_geometry(|g| g.max_transfer = 32768)
            .with_buffer_budget(32768);
        let dev = ByteDevice::new(Arc::new(device));
        // Block 0 can't be read; block 4 uses the same buffer for its edge blocks.
        dev.device().spoil(0..512);
        let part = |block: u64| {
            let span = dev.first_piece(block * 512 + 8, 8);
            (span, dev.try_buffer(&span).unwrap())
        };
        let (span, buffer) = part(0);
        assert!(block_on(dev.write(span, buffer, false)).is_err());
        let (span, buffer) = part(4);
        // Allocate all remaining buffers.
        let others: Vec<Buffer> = std::iter::from_fn(|| dev.device().try_buffer(512)).collect();
        assert_eq!(block_on(dev.write(span, buffer, false)), Ok(()));
        drop(others);
    }

    #[test]
    fn write_zeroes_needs_no_pool_buffer() {
        use std::task::{Context, Poll, Waker};

        let disk = MemoryDevice::new(1 << 20, 512).unwrap();
        let disk = disk.with_geometry(|g| (g.max_write_zeroes, g.max_transfer) = (0, 256 << 10));
        let dev = ByteDevice::new(Arc::new(disk.with_buffer_budget(512 << 10)));
        dev.device().memory().fill(0, 1 << 20, 7);
        // One client doesn't read its data, and all remaining buffers are in use.
        let unread = dev.device().try_buffer(256 << 10);
        assert!(unread.is_some(), "the zeroes are a small part");
        let rest: Vec<Buffer> = std::iter::from_fn(|| dev.device().try_buffer(512)).collect();
        let zero = dev.write_zeroes(512..513_000, ZeroOptions::default());
        let mut cx = Context::from_waker(Waker::noop());
        assert_eq!(std::pin::pin!(zero).poll(&mut cx), Poll::Ready(Ok(())));
        assert!(dev.device().try_buffer(512).is_none());
        drop((unread, rest));
        let mut bytes = vec![0; 1 << 20];
        dev.device().memory().read(0, &mut bytes);
        assert!(bytes[512..513_000].iter().all(|byte| *byte == 0));
        assert!(bytes[..512].iter().all(|byte| *byte == 7));
        assert!(bytes[513_000..].iter().all(|byte| *byte == 7));
    }

    #[test]
    fn fast_zeroes_are_not_written_as_data() {
        let fast = ZeroOptions {
            fast: true,
            ..ZeroOptions::default()
        };
        let dev = byte_device(512, true);
        block_on(async {
            write(&dev, 0, &[1; 2048]).await;
            assert_eq!(dev.write_zeroes(0..512, fast).await, Ok(()));
            let part = dev.write_zeroes(512..1000, fast).await;
            assert_eq!(part, Err(BlockError::Unsupported));
            let bytes = read(&dev, 0, 2048).await;
            assert!(bytes[..512] == [0; 512] && bytes[512..] == [1; 1536]);
        });
        let dev = byte_device(512, false);
        let zeroed = block_on(dev.write_zeroes(0..512, fast));
        assert_eq!(zeroed, Err(BlockError::Unsupported));
    }

    async fn write(dev: &ByteDevice<MemoryDevice>, mut offset: u64, mut data: &[u8]) {
        while !data.is_empty() {
            let span = dev.first_piece(offset, data.len() as u64);
            let buffer = dev.try_buffer(&span).unwrap();
            buffer.slice().fill(0, buffer.len(), 0xEE);
            buffer.slice().write(span.head, &data[..span.len]);
            dev.write(span, buffer, false).await.unwrap();
            offset += span.len as u64;
            data = &data[span.len..];
        }
    }

    async fn read(dev: &ByteDevice<MemoryDevice>, offset: u64, len: usize) -> Vec<u8> {
        let mut out = Vec::new();
        while out.len() < len {
            let span = dev.first_piece(offset + out.len() as u64, (len - out.len()) as u64);
            let buffer = dev
                .read(span, dev.try_buffer(&span).unwrap())
                .await
                .unwrap();
            let part = buffer.slice().slice(span.head..span.head + span.len);
            out.extend(part.unwrap().to_vec());
        }
        out
    }

    #[test]
    fn spans_cover_whole_blocks() {
        let span = Span::new(512, 1000, 100);
        assert_eq!((span.start, span.covering, span.head), (512, 1024, 488));
        assert!(!span.is_aligned());
        assert!(Span::new(4096, 8192, 4096).is_aligned());
    }

    #[derive(Clone, Debug)]
    enum Op {
        Write(u64, Vec<u8>),
        Zero(u64, u64),
        Read(u64, usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        let offset = 0..SIZE;
        prop_oneof![
            (
                offset.clone(),
                proptest::collection::vec(any::<u8>(), 1..9000)
            )
                .prop_map(|(at, mut data)| {
                    data.truncate((SIZE - at) as usize);
                    Op::Write(at, data)
                }),
            (offset.clone(), 1..50_000u64).prop_map(|(at, len)| Op::Zero(at, len.min(SIZE - at))),
            (offset, 1..50_000usize)
                .prop_map(|(at, len)| Op::Read(at, len.min((SIZE - at) as usize))),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn device_behaves_like_byte_array(
            ops in proptest::collection::vec(op(), 1..40),
            block in prop_oneof![Just(512u32), Just(4096u32)],
            zeroes: bool,
        ) {
            let dev = byte_device(block, zeroes);
            let mut model = vec![0u8; SIZE as usize];
            block_on(async {
                for op in ops {
                    match op {
                        Op::Write(at, data) => {
                            write(&dev, at, &data).await;
                            model[at as usize..at as usize + data.len()].copy_from_slice(&data);
                        }
                        Op::Zero(at, len) => {
                            dev.write_zeroes(at..at + len, ZeroOptions::default()).await.unwrap();
                            model[at as usize..(at + len) as usize].fill(0);
                        }
                        Op::Read(at, len) => {
                            let got = read(&dev, at, len).await;
                            assert_eq!(got, &model[at as usize..at as usize + len]);
                        }
                    }
                }
            });
            let mut all = vec![0; SIZE as usize];
            dev.device().memory().read(0, &mut all);
            prop_assert_eq!(all, model);
        }
    }

    #[test]
    fn concurrent_adjacent_writes_lose_nothing() {
        let device = MemoryDevice::new(8192, 4096)
            .unwrap()
            .with_thread()
            .unwrap();
        let dev = Arc::new(ByteDevice::new(Arc::new(device)));
        let (tx, rx) = mpsc::channel();
        for i in 0..256usize {
            let (dev, tx) = (dev.clone(), tx.clone());
            // Single-byte writes on both sides of a block boundary; there is no overlap.
            spawn(async move {
                let offset = 3968 + i as u64;
                let span = dev.span(offset, 1);
                let buffer = dev.try_buffer(&span).unwrap();
                buffer.slice().write(span.head, &[i as u8]);
                dev.write(span, buffer, false).await.unwrap();
                tx.send(()).unwrap();
            });
        }
        for _ in 0..256 {
            rx.recv().unwrap();
        }
        let mut got = vec![0; 256];
        dev.device().memory().read(3968, &mut got);
        assert_eq!(got, (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn status_is_clipped_to_range() {
        let dev = byte_device(512, true);
        block_on(async {
            write(&dev, 65536, &[1; 512]).await;
            let got = dev.status(100..65536 + 700).await.unwrap();
            let want = [(65436, ExtentKind::Hole), (700, ExtentKind::Data)];
            assert_eq!(got.len(), 2);
            for (extent, (len, kind)) in got.iter().zip(want) {
                assert_eq!((extent.len, extent.kind), (len, kind));
            }
        });
    }

    #[test]
    fn failed_edge_read_fails_single_write() {
        let dev = byte_device(512, true);
        dev.device().spoil(0..512);
        block_on(async {
            let span = dev.span(10, 5);
            let buffer = dev.try_buffer(&span).unwrap();
            assert!(matches!(
                dev.write(span, buffer, false).await,
                Err(BlockError::Medium(_))
            ));
            write(&dev, 2048 + 10, &[7]).await;
            assert_eq!(read(&dev, 2058, 1).await, [7]);
        });
    }
}
