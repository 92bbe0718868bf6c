"""Types of the compiler: mesh, layout, space-time map, factor rule, plan and program."""
