//! `cargo xtask screenshots`: the status page as a browser shows it while the daemon has work.

use crate::packages::{Need, ensure, need};
use crate::{Failure, root, sh};

const NEEDS: &[Need] = &[need("chromium", "chromium", "the picture")];

/// Lets the page's own test take the picture.
pub(crate) fn run() -> Result<(), Failure> {
    if !ensure(&NEEDS.iter().collect::<Vec<_>>()).is_empty() {
        return Err("there is no browser".into());
    }
    let file = root().join("deploy/status-page.png");
    let args = [
        "test",
        "--release",
        "-p",
        "riser-tests",
        "--test",
        "status_page",
        "--",
        "--nocapture",
    ];
    let status = sh::cargo(args).env("RISER_SCREENSHOT", &file).status()?;
    if !status.success() {
        return Err("the page does not pass its test".into());
    }
    println!("{}", file.display());
    Ok(())
}
