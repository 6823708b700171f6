//! Measures how many instructions are added to a read by counting the command.
//!
//! The read uses an in-memory wire, so that every measurement does the same work.

use std::path::Path;

use crate::{Failure, sh};

/// Benchmark to run, function to measure, and the two command counts to compare.
const READS: (&str, &str, [u64; 2]) = ("reads", "*Worker*step*", [500, 1500]);
const COUNTING: (&str, &str, [u64; 2]) = ("counting", "*commands*count_one*", [1000, 11_000]);

/// Maximum cost of counting a command, in percent. If the queue is deep, several commands share a
/// round of the worker loop. This means that the cost of a command is smaller, so this percentage
/// is larger.
const LIMIT: f64 = 2.0;

/// Measures and prints the cost and the percentage used for counting. Returns an error if it
/// exceeds the limit.
pub(super) fn run() -> Result<(), Failure> {
    let args = ["bench", "-q", "-p", "riser-target", "--bench", "commands"];
    let program = sh::built(&args, "commands")?;
    let read = each(&program, READS)?;
    let counting = each(&program, COUNTING)?;
    println!(
        "a read of 4 KiB over SRP on `roce`, backend in memory: {read:.0} instructions of the worker"
    );
    let share = 100.0 * counting / read;
    println!("counting it, with its times by stage: {counting:.0} instructions, {share:.2} %");
    within_limit(share)
}

fn within_limit(share: f64) -> Result<(), Failure> {
    // If the code to measure is missing, the cost is zero, which must not be treated as success.
    if share > 0.0 && share <= LIMIT {
        return Ok(());
    }
    Err(format!("counting costs {share:.2} %, the limit is {LIMIT} %").into())
}

/// Returns the number of instructions per command, based on the difference between many and few
/// commands.
fn each(
    program: &Path,
    (subject, function, [few, many]): (&str, &str, [u64; 2]),
) -> Result<f64, Failure> {
    // We use the difference between two measurements because startup, login and initialization have
    // the same cost in both.
    let few_cost = collected(program, subject, function, few)?;
    let many_cost = collected(program, subject, function, many)?;
    let cost = many_cost.checked_sub(few_cost);
    let cost = cost.ok_or("more commands cost less")?;
    // If the pattern doesn't match any function, the cost is zero in both measurements. This would
    // look like a valid result.
    if few_cost == 0 {
        return Err(format!("{function} is not in {}", program.display()).into());
    }
    Ok(cost as f64 / (many - few) as f64)
}

/// Returns the instructions used by a function and its callees while the program is running `n`
/// commands. We exclude the in-memory wire, because it polls both sides all the time to check if
/// they have data to send.
fn collected(program: &Path, subject: &str, function: &str, n: u64) -> Result<u64, Failure> {
    let scratch = sh::Scratch::new("instructions")?;
    let file = scratch.join("callgrind.out");
    let options = [
        "--tool=callgrind".to_owned(),
        "--collect-atstart=no".to_owned(),
        // If this is not set, the thread that runs the worker might never let the other thread log
        // in.
        "--fair-sched=yes".to_owned(),
        format!("--callgrind-out-file={}", file.display()),
        format!("--toggle-collect={function}"),
    ];
    let mut command = sh::cmd("valgrind", &options);
    command.arg(program).args([subject, &n.to_string()]);
    sh::output(&mut command)?;
    let mut annotate = sh::cmd("callgrind_annotate", ["--auto=no", "--threshold=100"]);
    let table = sh::output(annotate.arg(&file))?;
    Ok(table.lines().filter_map(own).sum())
}

/// Parses the number of instructions in a table row, if the row is for a function that we count.
fn own(line: &str) -> Option<u64> {
    let (number, rest) = line.trim_start().split_once(" (")?;
    let (_, function) = rest.split_once("%)  ")?;
    let counts = function.contains(':') && !function.contains("riser_transport::loopback::");
    // Function rows contain the file name and a colon, but totals don't.
    counts.then(|| number.replace(',', "").parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_above_limit_fails() {
        assert!(within_limit(0.9).is_ok());
        for share in [0.0, 2.1, f64::NAN] {
            assert!(within_limit(share).is_err(), "{share}");
        }
    }

    #[test]
    fn table_lines_are_distinguished() {
        assert_eq!(own("169,169,210 (100.0%)  PROGRAM TOTALS"), None);
        assert_eq!(own("  1,234 ( 0.10%)  src/a.rs:a::b [/x]"), Some(1234));
        let wire = "9 ( 0.10%)  src/option.rs:<riser_transport::loopback::Endpoint as P>::progress";
        assert_eq!(own(wire), None);
        assert_eq!(own("Ir                   file:function"), None);
    }
}
