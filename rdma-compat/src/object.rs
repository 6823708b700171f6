//! Objects that programs have pointers to.
//!
//! An [`Object`] consists of a structure of the C interface, whose address is known to the program,
//! and the library's own data. Its memory is never returned to the allocator. When an object is
//! destroyed, it is reused for the next object of the same kind. So a pointer to a destroyed object
//! can be checked and is rejected, unless its memory was reused. In this case, it refers to the new
//! object.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::errno::Errno;
use crate::lock::shielded;

/// A kind of object.
pub(crate) trait Kind: Sized + Send + Sync + 'static {
    /// Structure of the C interface.
    type C: 'static;
    /// Structure that the program's pointers refer to: `C`, or a member of it.
    type Handle: 'static;
    /// Offset of the handle in `C`, in bytes.
    const OFFSET: usize = 0;
    /// Tag of live objects of this kind.
    const TAG: u32;

    /// Returns the memory of destroyed objects of this kind.
    fn spares() -> &'static Spares<Self>;
}

/// Memory of destroyed objects.
pub(crate) struct Spares<K: Kind>(Mutex<Vec<Ref<K>>>);

impl<K: Kind> Spares<K> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }
}

#[repr(C)]
struct Object<K: Kind> {
    c: UnsafeCell<K::C>,
    tag: AtomicU32,
    kind: UnsafeCell<MaybeUninit<K>>,
}

/// A live object.
pub(crate) struct Ref<K: Kind>(NonNull<Object<K>>);

impl<K: Kind> Clone for Ref<K> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<K: Kind> Copy for Ref<K> {}
impl<K: Kind> PartialEq for Ref<K> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

// SAFETY: the memory is never freed. Every `Kind` can be shared between threads, and the structure
// of the C interface is only accessed via raw pointers.
unsafe impl<K: Kind> Send for Ref<K> {}
// SAFETY: as above.
unsafe impl<K: Kind> Sync for Ref<K> {}

impl<K: Kind> Ref<K> {
    /// Creates an object.
    pub(crate) fn new(c: K::C, kind: K) -> Self {
        let spare = shielded(&K::spares().0).pop();
        let Some(spare) = spare else {
            let object = Box::new(Object::<K> {
                c: UnsafeCell::new(c),
                tag: AtomicU32::new(K::TAG),
                kind: UnsafeCell::new(MaybeUninit::new(kind)),
            });
            return Self(NonNull::from(Box::leak(object)));
        };
        // SAFETY: the memory is never freed, and unused memory is not accessed by other threads.
        unsafe {
            let object = spare.0.as_ref();
            object.c.get().write(c);
            (*object.kind.get()).write(kind);
            object.tag.store(K::TAG, Ordering::Release);
        }
        spare
    }

    /// Returns the object for a program's pointer.
    ///
    /// # Errors
    /// Returns `EINVAL` if the pointer is invalid.
    ///
    /// # Safety
    /// The pointer must be null, or must have been returned by this library for an object of this
    /// kind.
    pub(crate) unsafe fn get(handle: *mut K::Handle) -> Result<Self, Errno> {
        if handle.is_null() {
            return Err(Errno::INVALID);
        }
        // SAFETY: the pointer was returned for such an object, whose memory is never freed.
        let object =
            unsafe { NonNull::new_unchecked(handle.byte_sub(K::OFFSET).cast::<Object<K>>()) };
        // SAFETY: as above.
        let tag = unsafe { &object.as_ref().tag };
        if tag.load(Ordering::Acquire) != K::TAG {
            return Err(Errno::INVALID);
        }
        Ok(Self(object))
    }

    /// Returns the program's pointer.
    pub(crate) fn handle(self) -> *mut K::Handle {
        // SAFETY: the handle is a member of the structure, at this offset.
        unsafe { self.c().byte_add(K::OFFSET).cast() }
    }

    /// Returns the structure of the C interface.
    pub(crate) fn c(self) -> *mut K::C {
        // SAFETY: the memory is never freed.
        unsafe { (*self.0.as_ptr()).c.get() }
    }

    /// Returns the library's data of the object, which must only be used while it is alive.
    pub(crate) fn kind(self) -> &'static K {
        // SAFETY: the object was alive when the reference was created. A program that destroys it
        // while another thread uses it violates the rules of the interface.
        unsafe { (*self.0.as_ref().kind.get()).assume_init_ref() }
    }

    /// Destroys the object for the program, but keeps it in memory forever, because there are other
    /// references to it.
    ///
    /// # Errors
    /// Same as for [`Ref::retire`].
    pub(crate) fn bury(self) -> Result<(), Errno> {
        // SAFETY: the memory is never freed.
        let tag = unsafe { &self.0.as_ref().tag };
        tag.compare_exchange(K::TAG, 0, Ordering::AcqRel, Ordering::Relaxed)
            .map(drop)
            .map_err(|_| Errno::INVALID)
    }

    /// Destroys the object and keeps its memory for the next object.
    ///
    /// # Errors
    /// Returns `EINVAL` if another thread has already destroyed it.
    pub(crate) fn retire(self) -> Result<(), Errno> {
        self.bury()?;
        // SAFETY: the memory is never freed.
        let object = unsafe { self.0.as_ref() };
        // SAFETY: it was alive until now, so it is initialized, and only one thread can get here.
        unsafe { (*object.kind.get()).assume_init_drop() };
        shielded(&K::spares().0).push(self);
        Ok(())
    }
}

impl<K: Kind> Deref for Ref<K> {
    type Target = K;

    fn deref(&self) -> &K {
        self.kind()
    }
}

/// Declares a kind of object.
macro_rules! kind {
    ($kind:ty, $c:ty, $tag:literal) => {
        $crate::object::kind!($kind, $c, $c, 0, $tag);
    };
    ($kind:ty, $c:ty, $handle:ty, $offset:expr, $tag:literal) => {
        impl $crate::object::Kind for $kind {
            type C = $c;
            type Handle = $handle;
            const OFFSET: usize = $offset;
            const TAG: u32 = u32::from_le_bytes(*$tag);

            fn spares() -> &'static $crate::object::Spares<Self> {
                static SPARES: $crate::object::Spares<$kind> = $crate::object::Spares::new();
                &SPARES
            }
        }
    };
}
pub(crate) use kind;
