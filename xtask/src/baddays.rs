//! `cargo xtask baddays`: what goes on when something is wrong, a line for each case.
//!
//! The cases are tests (`tests/tests/baddays`), with the programs as an operator runs them, so they are also a
//! part of `cargo xtask test`.

use std::time::Instant;

use crate::{Failure, sh};

/// Runs them one after another, so that each has its time.
pub(crate) fn run() -> Result<(), Failure> {
    let args = ["test", "-q", "-p", "riser-tests", "--test", "baddays"];
    let program = sh::built(&args, "baddays")?;
    let list = sh::output(&mut sh::cmd(&program, ["--list", "--format", "terse"]))?;
    let cases: Vec<_> = list
        .lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .collect();
    let mut failed = 0;
    for case in &cases {
        let begin = Instant::now();
        let mut command = sh::cmd(&program, ["--exact", case]);
        command.current_dir(crate::root().join("tests"));
        let result = sh::output(&mut command);
        let seconds = begin.elapsed().as_secs_f64();
        let name = case.rsplit("::").next().unwrap_or(case).replace('_', " ");
        let word = if result.is_ok() { "ok" } else { "FAILED" };
        println!("{word:<7} {seconds:5.1} s  {name}");
        if let Err(error) = result {
            println!("{error}");
            failed += 1;
        }
    }
    if cases.is_empty() {
        return Err("there are no cases".into());
    }
    println!("{} passed, {failed} failed", cases.len() - failed);
    match failed {
        0 => Ok(()),
        _ => Err(format!("{failed} of {} cases failed", cases.len()).into()),
    }
}
