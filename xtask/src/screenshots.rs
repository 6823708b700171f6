//! `cargo xtask screenshots`: the status page and the dashboard as a browser shows them while the daemon has
//! work.
//!
//! Grafana itself is in no archive that a Debian machine has, but the components that it draws with are
//! published: `tests/grafana` draws the dashboard's own file with those.

use std::fs;

use crate::packages::{Need, ensure, need};
use crate::{Failure, root, sh};

const NEEDS: &[Need] = &[
    need("chromium", "chromium", "the pictures"),
    need("prometheus", "prometheus", "the dashboard"),
    need("npm", "npm", "the dashboard"),
];

/// Lets the tests of both take the pictures.
pub(crate) fn run() -> Result<(), Failure> {
    if !ensure(&NEEDS.iter().collect::<Vec<_>>()).is_empty() {
        return Err("not all that it takes is there".into());
    }
    let (source, work) = (root().join("tests/grafana"), root().join(".build/grafana"));
    let page = work.join("page");
    fs::create_dir_all(&page)?;
    for file in [
        "package.json",
        "package-lock.json",
        "picture.jsx",
        "page/index.html",
    ] {
        fs::copy(source.join(file), work.join(file))?;
    }
    for args in [&["ci", "--ignore-scripts"][..], &["run", "build"]] {
        sh::run(sh::cmd("npm", args).current_dir(&work))?;
    }
    let pictures = [
        ("status_page", "deploy/status-page.png"),
        ("prometheus", "deploy/grafana/dashboard.png"),
    ];
    for (test, file) in pictures {
        let file = root().join(file);
        let args = ["test", "--release", "-p", "riser-tests", "--test", test];
        let status = sh::cargo(args)
            .args(["--", "--nocapture"])
            .env("RISER_SCREENSHOT", &file)
            .env("RISER_DASHBOARD", &page)
            .status()?;
        if !status.success() {
            return Err(format!("{test} does not pass its test").into());
        }
        println!("{}", file.display());
    }
    Ok(())
}
