"""`python -m boinc_project.cli`: the `boinc-train` command without its installed script."""

from boinc_project.cli.main import main

if __name__ == "__main__":
    main(prog_name="boinc-train")
