//! In-memory disk, used to test exports without a target.

use std::fmt;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;

use riser_memory::Memory;

use super::{
    BlockDevice, BlockError, Buffer, BufferWaiters, Extent, ExtentKind, Geometry, ZeroOptions,
};

/// Granularity of allocation tracking in bytes.
const GRANULE: u64 = 65536;

/// Max bytes in allocated buffers.
const BUFFER_BUDGET: u64 = 64 << 20;

/// In-memory disk. Pages are only allocated when data is written.
pub struct MemoryDevice {
    geometry: Geometry,
    memory: Memory,
    allocated: Mutex<Vec<bool>>,
    bad: Mutex<Vec<Range<u64>>>,
    rotten: Mutex<Vec<u64>>,
    pool: Arc<Pool>,
    flushes: AtomicU64,
    buffer_budget: u64,
    worker: Option<mpsc::Sender<Arc<Mutex<Later>>>>,
}

impl fmt::Debug for MemoryDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryDevice")
            .field("geometry", &self.geometry)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Later {
    done: bool,
    waker: Option<Waker>,
}

struct LaterFuture(Arc<Mutex<Later>>);

impl Future for LaterFuture {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut later = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if later.done {
            return Poll::Ready(());
        }
        later.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// Number of bytes in allocated buffers, and waiters.
#[derive(Default)]
struct Pool {
    leased: AtomicU64,
    waiters: BufferWaiters,
}

struct Lease(Arc<Pool>, u64);

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.leased.fetch_sub(self.1, Ordering::AcqRel);
        self.0.waiters.wake_all();
    }
}

impl MemoryDevice {
    /// Creates a disk of `capacity` bytes, which must be a multiple of `block_size`. All data is
    /// set to zero.
    ///
    /// # Errors
    /// Returns `InvalidInput` if the block size is not a power of two of at least 512, or if the
    /// capacity is not a multiple of the block size; otherwise an error from `mmap(2)`.
    pub fn new(capacity: u64, block_size: u32) -> io::Result<Self> {
        let len = usize::try_from(capacity).map_err(|_| io::ErrorKind::InvalidInput)?;
        if block_size < 512
            || !block_size.is_power_of_two()
            || capacity == 0
            || !capacity.is_multiple_of(u64::from(block_size))
        {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self {
            geometry: Geometry {
                block_size,
                physical_block_size: block_size.max(4096),
                capacity,
                max_transfer: 1 << 20,
                optimal_transfer: 1 << 20,
                max_discard: 1 << 30,
                max_write_zeroes: 1 << 30,
                reports_status: true,
                read_only: false,
                // This disk is used to test the exports, so by default we enable the write cache,
                // allocation status and all commands.
                volatile_cache: true,
                flushes: true,
                stable_writes: true,
            },
            memory: Memory::new(len)?,
            allocated: Mutex::new(vec![false; capacity.div_ceil(GRANULE) as usize]),
            bad: Mutex::default(),
            rotten: Mutex::default(),
            pool: Arc::default(),
            flushes: AtomicU64::new(0),
            buffer_budget: BUFFER_BUDGET,
            worker: None,
        })
    }

    /// Changes the geometry of this disk. The size and the block size must not be changed.
    #[must_use]
    pub fn with_geometry(mut self, change: impl FnOnce(&mut Geometry)) -> Self {
        let (block_size, capacity) = (self.geometry.block_size, self.geometry.capacity);
        change(&mut self.geometry);
        assert_eq!(
            (block_size, capacity),
            (self.geometry.block_size, self.geometry.capacity)
        );
        self
    }

    /// Limits the total buffer size to `bytes`, but allows at least one transfer of the max size.
    #[must_use]
    pub fn with_buffer_budget(mut self, bytes: u64) -> Self {
        self.buffer_budget = bytes.max(u64::from(self.geometry.max_transfer));
        self
    }

    /// Completes operations on a separate thread, like a transport.
    ///
    /// # Errors
    /// Returns an error if the thread can't be started.
    pub fn with_thread(mut self) -> io::Result<Self> {
        let (tx, rx) = mpsc::channel::<Arc<Mutex<Later>>>();
        thread::Builder::new()
            .name("memory-disk".into())
            .spawn(move || {
                for later in rx {
                    let waker = {
                        let mut later = later.lock().unwrap_or_else(PoisonError::into_inner);
                        later.done = true;
                        later.waker.take()
                    };
                    if let Some(waker) = waker {
                        waker.wake();
                    }
                }
            })?;
        self.worker = Some(tx);
        Ok(self)
    }

    /// After this call, all reads and writes in the range will fail with a medium error.
    pub fn spoil(&self, range: Range<u64>) {
        self.bad
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(range);
    }

    /// After this call, reads will return this byte inverted.
    pub fn rot(&self, offset: u64) {
        self.rotten
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(offset);
    }

    /// Number of flushes so far.
    #[must_use]
    pub fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Relaxed)
    }

    /// Returns the disk content, so that a test can verify it.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    fn check(&self, range: &Range<u64>) -> Result<(), BlockError> {
        let block = u64::from(self.geometry.block_size);
        assert!(
            range.start.is_multiple_of(block) && range.end.is_multiple_of(block),
            "{range:?} is not in whole blocks"
        );
        if range.start > range.end || range.end > self.geometry.capacity {
            return Err(BlockError::OutOfRange);
        }
        let bad = self.bad.lock().unwrap_or_else(PoisonError::into_inner);
        match bad
            .iter()
            .find(|b| b.start < range.end && range.start < b.end)
        {
            Some(b) => Err(BlockError::Medium(format!("byte {}", b.start))),
            None => Ok(()),
        }
    }

    fn check_write(&self, range: &Range<u64>) -> Result<(), BlockError> {
        if self.geometry.read_only {
            return Err(BlockError::ReadOnly);
        }
        self.check(range)
    }

    fn set_allocated(&self, granules: Range<u64>, to: bool) {
        let mut allocated = self
            .allocated
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for granule in granules {
            allocated[granule as usize] = to;
        }
    }

    fn zero(&self, range: &Range<u64>) {
        self.memory
            .fill(range.start as usize, (range.end - range.start) as usize, 0);
    }

    fn unmap(&self, range: &Range<u64>) {
        self.zero(range);
        let first = range.start.div_ceil(GRANULE);
        let end = if range.end == self.geometry.capacity {
            range.end.div_ceil(GRANULE)
        } else {
            range.end / GRANULE
        };
        self.set_allocated(first..end.max(first), false);
    }

    fn touch(&self, range: &Range<u64>) {
        self.set_allocated(range.start / GRANULE..range.end.div_ceil(GRANULE), true);
    }

    /// If the disk has a thread, completes on this thread.
    async fn complete_on_thread(&self) {
        if let Some(worker) = &self.worker {
            let later = Arc::new(Mutex::new(Later::default()));
            worker
                .send(later.clone())
                .expect("the disk's thread lives as long as the disk");
            LaterFuture(later).await;
        }
    }
}

impl BlockDevice for MemoryDevice {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn try_buffer(&self, len: usize) -> Option<Buffer> {
        assert!(len <= self.geometry.max_transfer as usize);
        let bytes = len as u64;
        let leased = self.pool.leased.fetch_add(bytes, Ordering::AcqRel) + bytes;
        if leased > self.buffer_budget {
            // These bytes were never allocated, so we don't need to wake a waiter.
            self.pool.leased.fetch_sub(bytes, Ordering::AcqRel);
            return None;
        }
        let lease = Lease(self.pool.clone(), bytes);
        let buffer = Buffer::anonymous(len).ok()?;
        Some(Buffer::leased(buffer.slice().clone(), Box::new(lease)))
    }

    fn buffer_bytes(&self) -> u64 {
        self.buffer_budget
    }

    fn wake_when_free(&self, waker: &Waker) {
        self.pool.waiters.register(waker);
    }

    async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer, BlockError> {
        let range = offset..offset + buffer.len() as u64;
        self.complete_on_thread().await;
        self.check(&range)?;
        let to = buffer.slice();
        Memory::copy(
            &self.memory,
            offset as usize,
            to.memory(),
            to.offset(),
            to.len(),
        );
        let rotten = self.rotten.lock().unwrap_or_else(PoisonError::into_inner);
        for at in rotten.iter().filter(|at| range.contains(at)) {
            let mut byte = [0];
            let at = (at - offset) as usize;
            to.read(at, &mut byte);
            to.write(at, &[!byte[0]]);
        }
        drop(rotten);
        Ok(buffer)
    }

    async fn write(&self, offset: u64, buffer: Buffer, _fua: bool) -> Result<Buffer, BlockError> {
        let range = offset..offset + buffer.len() as u64;
        self.complete_on_thread().await;
        self.check_write(&range)?;
        let from = buffer.slice();
        Memory::copy(
            from.memory(),
            from.offset(),
            &self.memory,
            offset as usize,
            from.len(),
        );
        self.touch(&range);
        Ok(buffer)
    }

    async fn flush(&self) -> Result<(), BlockError> {
        self.complete_on_thread().await;
        self.flushes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    async fn discard(&self, range: Range<u64>) -> Result<(), BlockError> {
        self.complete_on_thread().await;
        self.check_write(&range)?;
        self.unmap(&range);
        Ok(())
    }

    async fn write_zeroes(
        &self,
        range: Range<u64>,
        options: ZeroOptions,
    ) -> Result<(), BlockError> {
        self.complete_on_thread().await;
        self.check_write(&range)?;
        if options.may_unmap {
            self.unmap(&range);
        } else {
            self.zero(&range);
            self.touch(&range);
        }
        Ok(())
    }

    async fn status(&self, range: Range<u64>) -> Result<Vec<Extent>, BlockError> {
        self.complete_on_thread().await;
        self.check(&range)?;
        let allocated = self
            .allocated
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let granule = at / GRANULE;
            let end = ((granule + 1) * GRANULE).min(range.end);
            let kind = if allocated[granule as usize] {
                ExtentKind::Data
            } else {
                ExtentKind::Hole
            };
            match extents.last_mut() {
                Some(last) if last.kind == kind => last.len += end - at,
                _ => extents.push(Extent {
                    len: end - at,
                    kind,
                }),
            }
            at = end;
        }
        Ok(extents)
    }
}
