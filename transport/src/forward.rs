//! Implementations of traits by the fields of a type.

/// Forwards methods to a field.
///
/// - `device`: the brackets contain the method of the field, or of a field inside it, such as
///   the tables of a [`Device`](crate::nic::Device). Methods marked with `@live` return an error if the
///   device has been removed, but destroying an object still works.
/// - `nic`: the field implements the same trait.
macro_rules! forward {
    ($mode:ident $field:ident;) => {};
    (device $field:ident; @live ref $name:ident [$($to:tt)*] ($($arg:ident: $ty:ty),*) -> $ret:ty; $($rest:tt)*) => {
        #[inline]
        fn $name(&self $(, $arg: $ty)*) -> $ret {
            self.$field.check_present()?;
            self.$field.$($to)*($($arg),*)
        }
        $crate::forward::forward! { device $field; $($rest)* }
    };
    (device $field:ident; @live mut $name:ident [$($to:tt)*] ($($arg:ident: $ty:ty),*) -> $ret:ty; $($rest:tt)*) => {
        #[inline]
        fn $name(&mut self $(, $arg: $ty)*) -> $ret {
            self.$field.check_present()?;
            self.$field.$($to)*($($arg),*)
        }
        $crate::forward::forward! { device $field; $($rest)* }
    };
    (device $field:ident; ref $name:ident [$($to:tt)*] ($($arg:ident: $ty:ty),*) -> $ret:ty; $($rest:tt)*) => {
        #[inline]
        fn $name(&self $(, $arg: $ty)*) -> $ret {
            self.$field.$($to)*($($arg),*)
        }
        $crate::forward::forward! { device $field; $($rest)* }
    };
    (device $field:ident; mut $name:ident [$($to:tt)*] ($($arg:ident: $ty:ty),*) -> $ret:ty; $($rest:tt)*) => {
        #[inline]
        fn $name(&mut self $(, $arg: $ty)*) -> $ret {
            self.$field.$($to)*($($arg),*)
        }
        $crate::forward::forward! { device $field; $($rest)* }
    };
    (nic $field:ident; $(@live)? ref $name:ident [$($to:tt)*] ($($arg:ident: $ty:ty),*) -> $ret:ty; $($rest:tt)*) => {
        #[inline]
        fn $name(&self $(, $arg: $ty)*) -> $ret {
            self.$field.$name($($arg),*)
        }
        $crate::forward::forward! { nic $field; $($rest)* }
    };
    (nic $field:ident; $(@live)? mut $name:ident [$($to:tt)*] ($($arg:ident: $ty:ty),*) -> $ret:ty; $($rest:tt)*) => {
        #[inline]
        fn $name(&mut self $(, $arg: $ty)*) -> $ret {
            self.$field.$name($($arg),*)
        }
        $crate::forward::forward! { nic $field; $($rest)* }
    };
}

pub(crate) use forward;
