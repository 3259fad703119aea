"""How nodes become a ring and how it schedules work: pure logic, without sockets, event loop or clock."""
