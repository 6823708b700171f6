//! Converts panics of the simulated programs to failures of the run.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Set while this thread is running programs: location and message of a panic.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Calls a function. If it panics, nothing is printed, and an error with the location is returned.
pub(crate) fn caught<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = take_hook();
        set_hook(Box::new(move |panic| {
            let is_ours = PANIC.with_borrow_mut(|text| {
                // Only keep the first panic, which causes any later panics during unwinding.
                let text = text.as_mut().filter(|text| text.is_empty());
                text.map(|text| *text = panic.to_string().replace('\n', " "))
            });
            if is_ours.is_none() {
                others(panic);
            }
        }));
    });
    PANIC.set(Some(String::new()));
    let result = catch_unwind(AssertUnwindSafe(f));
    let text = PANIC.take().unwrap_or_default();
    result.map_err(|_| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_reports_location() {
        let why = caught(|| panic!("{} wrong", "all")).unwrap_err();
        assert!(
            why.contains("caught.rs:") && why.ends_with("all wrong"),
            "{why}"
        );
        assert_eq!(caught(|| 3), Ok(3));
    }
}
